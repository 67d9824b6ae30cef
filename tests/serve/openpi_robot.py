"""A robot that only uses openpi_client; run by another interpreter that has openpi_client but not pirl.

python openpi_robot.py ADDRESS KEY SEEN.npz OUT.npz
"""

import json
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def main() -> None:
    address, key, seen, out = sys.argv[1:]
    observation: dict = {}
    with np.load(seen, allow_pickle=False) as arrays:
        for path, value in arrays.items():
            *parents, name = path.split("/") if path.startswith("images/") else [path]
            place = observation
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = str(value) if value.dtype.kind == "U" else value
    policy = WebsocketClientPolicy(host=address, api_key=key or None)
    replies = [policy.infer(observation) for _ in range(2)]
    horizon = len(replies[0]["actions"])
    broker = ActionChunkBroker(policy, action_horizon=horizon)
    steps = [broker.infer(observation) for _ in range(2 * horizon)]
    try:
        policy.infer({"nothing": np.zeros(3)})
        said = ""
    except RuntimeError as error:
        said = str(error)
    actions = {f"reply{i}": reply["actions"] for i, reply in enumerate(replies)}
    np.savez(out, **actions, steps=np.stack([step["actions"] for step in steps]))
    plain = {name: value for name, value in replies[1].items() if name != "actions"}
    print(json.dumps({"metadata": policy.get_server_metadata(), "reply": plain, "said": said, "numpy": np.__version__}))


if __name__ == "__main__":
    main()
