"""Success of saved weights in the simulators: environments in processes, one policy batch for all of them.

Chunks are executed open-loop to their end, and the rest is dropped at the end of an episode, as in the paper. The pool
is always full: where an episode ends, the next one begins.
"""

import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from qc_play import TASKS, log

Act = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(states [slots, S], tasks [slots], round) -> chunks [slots, H, A]."""


def serve(name: str, slots: int, pipe: Any) -> None:
    """Main loop of a process: execute commands for its environments until it receives None."""
    import gymnasium

    warnings.filterwarnings("ignore")
    import ogbench.manipspace  # noqa: F401

    envs = [gymnasium.make(f"{name}-singletask-v0") for _ in range(slots)]
    pipe.send("ready")
    while (commands := pipe.recv()) is not None:
        pipe.send(
            [None if command is None else obey(env, *command) for env, command in zip(envs, commands, strict=True)]
        )


def obey(env: Any, what: str, *about: Any) -> tuple[np.ndarray, bool, bool]:
    """Begin an episode (task, seed) or execute a chunk; returns (state, over, solved)."""
    if what == "begin":
        task, seed = about
        env.unwrapped._reward_task_id = task
        state, _ = env.reset(seed=seed)
        return np.asarray(state, np.float32), False, False
    for action in about[0]:
        state, _, terminated, truncated, info = env.step(np.clip(action, -1, 1))
        if terminated or truncated:
            break
    return np.asarray(state, np.float32), bool(terminated or truncated), bool(info["success"])


class Fleet:
    """Environments of one domain in several processes, addressed as slots."""

    def __init__(self, name: str, workers: int, per_worker: int) -> None:
        """Start the processes, which take a while to build their scenes."""
        context = multiprocessing.get_context("spawn")
        self.name, self.per_worker = name, per_worker
        self.pipes, self.processes = [], []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, per_worker, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    @property
    def slots(self) -> int:
        """Total number of environments."""
        return len(self.pipes) * self.per_worker

    def tell(self, commands: list[Any]) -> list[Any]:
        """Send one command per slot, in parallel; None skips a slot."""
        n = self.per_worker
        for i, pipe in enumerate(self.pipes):
            pipe.send(commands[i * n : (i + 1) * n])
        return [answer for pipe in self.pipes for answer in pipe.recv()]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)


def evaluate(fleet: Any, act: Act, *, episodes: int, seed: list[int], state_dim: int) -> np.ndarray:
    """Successes [TASKS, episodes]; `seed`, task and episode number determine an episode's initial state."""
    waiting = [(task, episode) for episode in range(episodes) for task in range(TASKS)][::-1]
    playing: list[tuple[int, int] | None] = [None] * fleet.slots
    states, tasks = np.zeros((fleet.slots, state_dim), np.float32), np.zeros(fleet.slots, np.int32)
    solved, rounds = np.zeros((TASKS, episodes), bool), 0
    while waiting or any(job is not None for job in playing):
        commands: list[Any] = [None] * fleet.slots
        chunks = act(states, tasks, rounds)
        for slot, job in enumerate(playing):
            if job is not None:
                commands[slot] = ("act", chunks[slot])
            elif waiting:
                task, episode = playing[slot] = waiting.pop()  # type: ignore[misc]
                start = np.random.SeedSequence([*seed, task, episode]).generate_state(1)[0]
                commands[slot], tasks[slot] = ("begin", task + 1, int(start)), task
        for slot, answer in enumerate(fleet.tell(commands)):
            if answer is not None:
                states[slot], over, success = answer
                if over:
                    job = playing[slot]
                    assert job is not None
                    solved[job], playing[slot] = success, None
        rounds += 1
    return solved


def timed(fleet: Any, act: Act, **options: Any) -> tuple[np.ndarray, float]:
    """(`evaluate`'s result, seconds); logged."""
    begin = time.monotonic()
    solved = evaluate(fleet, act, **options)
    seconds = time.monotonic() - begin
    rates = " ".join(f"{rate:.2f}" for rate in solved.mean(1))
    log(f"eval {fleet.name} {options['seed']}: {rates} in {seconds:.0f} s")
    return solved, seconds
