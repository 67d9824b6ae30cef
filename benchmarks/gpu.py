"""Speed and memory of full-size π₀ on one GPU: training steps of every algorithm, sampling, best-of-N; random weights.

    PYTHONPATH=src python benchmarks/gpu.py --quick                              the rows that the others follow from
    PYTHONPATH=src python benchmarks/gpu.py --only bc,awr --markdown out.md      these rows
    PYTHONPATH=src python benchmarks/gpu.py --list                               what rows there are

Needs jax, optax and jaxtyping (augmax for `--augment`). A row is the median of its repeats after a warm-up; a step's
time is from the end of one step to the end of the next. FLOPs are the model's, without rematerialisation; their share
is relative to the rate of one large bfloat16 GEMM, measured first. Memory is the compiled program's: arguments, results
and temporaries. With `--threads` all programs are compiled in parallel before the first one runs: faster overall, but
each takes longer than alone, and they are autotuned while others use the GPU.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import Agent
from pirl.agents.bc import BC
from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.agents.ript import RIPT
from pirl.kernels import attention
from pirl.models import flow, pi0
from pirl.models.config import Attention, FreezeRule, Pi0Config, Remat, get_preset
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.freeze import trainable_mask
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.parallel.sharding import data_sharding, make_mesh, sharded_shapes, state_shardings
from pirl.planning.flops import count_flops
from pirl.training import compiler
from pirl.training.config import AdamW, ConstantSchedule, CosineSchedule
from pirl.training.step import Step

GIB = 2**30
LONGEST = 30.0
"""Seconds after which a row with three repeats stops repeating."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    name: str
    """Name for `--only`."""
    what: str
    """`sample`, or an algorithm: `bc`, `awr`, `distill`, `ript`."""
    size: int = 32
    """Observations per step."""
    cameras: int = 3
    """Images per observation."""
    rule: FreezeRule = "full"
    """Freeze rule; `lora` adds adapters of OpenPI's sizes."""
    num: int = 4
    """Candidates per observation."""
    updates: int = 1
    """Critic updates per step."""
    pi05: bool = False
    """π₀.₅ instead of π₀."""
    remat: Remat | None = None
    """Overrides `--remat`, where memory requires it."""
    quick: bool = False
    """Whether it is part of `--quick`."""

    def __str__(self) -> str:
        model = "π₀.₅" if self.pi05 else "π₀"
        if self.what == "sample":
            return f"{model}: {self.num} chunk(s) for each of {self.size}"
        extras = {"awr": f", best of {self.num}", "distill": f", best of {self.num}"}.get(self.what, "")
        extras += f", {self.updates} critic updates" if self.updates > 1 else ""
        extras += f", {self.rule}" if self.rule != "full" else ""
        extras += f", remat {self.remat}" if self.remat else ""
        return f"{model} {self.what}: batch {self.size}, {self.cameras} cameras{extras}"


ROWS = (
    Row(name="sample-1", what="sample", size=1, num=1, quick=True),
    Row(name="sample-8", what="sample", size=8, num=1),
    Row(name="sample-32", what="sample", num=1),
    Row(name="best-of-4", what="sample", num=4),
    Row(name="best-of-32", what="sample", num=32),
    Row(name="best-of-32-alone", what="sample", size=1, num=32),
    Row(name="bc", what="bc", quick=True),
    Row(name="bc-8", what="bc", size=8),
    Row(name="bc-64", what="bc", size=64, remat="full"),
    Row(name="bc-2cam", what="bc", cameras=2),
    Row(name="bc-full-remat", what="bc", remat="full"),
    Row(name="bc-lora", what="bc", rule="lora"),
    Row(name="awr", what="awr", quick=True),
    Row(name="awr-8", what="awr", size=8),
    Row(name="awr-2cam", what="awr", cameras=2),
    Row(name="awr-frozen", what="awr", rule="vlm_frozen"),
    Row(name="awr-lora", what="awr", rule="lora"),
    Row(name="awr-n32", what="awr", num=32),
    Row(name="awr-utd10", what="awr", updates=10),
    Row(name="distill-frozen", what="distill", rule="vlm_frozen"),
    Row(name="ript-nft", what="ript"),
    Row(name="ript-lora", what="ript", rule="lora"),
    Row(name="pi05-sample-1", what="sample", size=1, num=1, pi05=True),
    Row(name="pi05-bc", what="bc", pi05=True),
    Row(name="pi05-awr", what="awr", pi05=True),
)


def real_dim(config: Pi0Config) -> int:
    """ALOHA's 14 state and action dimensions, at most the model's."""
    return min(14, config.action_dim)


def critic_horizon(config: Pi0Config) -> int:
    """Steps the critic scores."""
    return min(10, config.horizon)


def batch(config: Pi0Config, size: int, cameras: int, key: jax.Array) -> dict[str, Any]:
    """A random batch with the columns of all algorithms; prompts fill a quarter to all of their length."""
    keys = iter(jax.random.split(key, 32))

    def observation() -> dict[str, Any]:
        shape = (size, config.image_size, config.image_size, 3)
        names, room = config.cameras[:cameras], config.token_len
        length = jax.random.randint(next(keys), (size, 1), room // 4, room + 1)
        return {
            "image": {n: jax.random.randint(next(keys), shape, 0, 256, jnp.int32).astype(jnp.uint8) for n in names},
            "image_mask": {n: jnp.ones(size, bool) for n in names},
            "state": jax.random.normal(next(keys), (size, config.action_dim)),
            "tokenized_prompt": jax.random.randint(next(keys), (size, room), 0, min(1000, config.vocab_size)),
            "tokenized_prompt_mask": jnp.arange(room)[None] < length,
        }

    actions = jax.random.normal(next(keys), (size, config.horizon, config.action_dim))
    ones = jnp.ones((size, config.horizon))
    return {
        "observations": observation(),
        "next_observations": observation(),
        "actions": actions,
        "critic_actions": actions[:, : critic_horizon(config)],
        "valid": ones,
        "next_terminal": jnp.zeros(size),
        "sequence_mask": jnp.ones(size),
        "length": jnp.full(size, critic_horizon(config), jnp.int32),
        "reward_sum": jnp.zeros(size),
        "mc_return": jnp.full(size, 0.5),
        "executed": ones,
        "advantage": jax.random.normal(next(keys), (size,)),
        "weight": jnp.ones(size),
        "fresh": jnp.zeros(size),
    }


def make_agent(config: Pi0Config, row: Row, *, augment: bool) -> Agent:
    """The algorithm with OpenPI's optimizer, and with an EMA if that is its default."""
    mask = None if row.rule == "full" else trainable_mask(pi0.param_shapes(config), config, row.rule)
    tx = make_optimizer(AdamW(), make_schedule(CosineSchedule()))
    learner = Learner(tx=tx, mask=mask, ema_decay=None if row.what == "ript" else 0.99)
    policy, frozen = Pi0(config), row.rule in ("vlm_frozen", "expert_only")
    if row.what == "bc":
        return BC(
            policy=policy, config=BCConfig(augment=augment), policy_learner=learner, real_action_dim=real_dim(config)
        )
    if row.what == "ript":
        return RIPT(
            policy=policy,
            config=RIPTConfig(augment=augment),
            policy_learner=learner,
            real_action_dim=real_dim(config),
            encoder_frozen=frozen,
            compute_dtype=config.dtype,
        )
    critic = make_critic(
        CriticConfig(),
        feature_width=config.vlm.width,
        state_dim=real_dim(config),
        real_action_dim=real_dim(config),
        critic_horizon=critic_horizon(config),
    )
    settings: dict[str, Any] = {
        "actor": row.what,
        "num_action_samples": row.num,
        "critic_updates": row.updates,
        "augment": augment,
    }
    return ACRLPD(
        policy=policy,
        critic=critic,
        config=ACRLPDConfig(**settings),
        policy_learner=learner,
        critic_learner=Learner(tx=make_optimizer(AdamW(), make_schedule(ConstantSchedule())), ema_decay=0.99),
        encoder_frozen=frozen,
    )


def sampler(config: Pi0Config, row: Row) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """A function (weights, observations, key) -> chunks, including the encoding of images."""
    policy = Pi0(config)

    def sample(params: Any, data: Any, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, (row.size, row.num, config.horizon, config.action_dim))
        return flow.sample(policy, params, policy.encode(params, Observation.from_dict(data)), noise)

    return sample


def sized(config: Pi0Config, row: Row) -> Pi0Config:
    """The model of a row."""
    if row.rule == "lora":
        config = replace(config, vlm=config.vlm.with_lora(16), expert=config.expert.with_lora(32))
    return replace(config, pi05=row.pi05 or config.pi05, remat=row.remat or config.remat)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row's traced programs; nothing is on the device yet."""

    given: tuple[Any, Any]
    """Traced programs that make the state (for sampling: the weights) and a batch."""
    placed: Callable[[Any, Any], tuple[Any, Any]]
    """Converts both to the step's inputs."""
    program: Any
    """The traced step."""
    step: Step | None
    """Runs the step; None for sampling."""
    flop: int
    """FLOPs of the step."""


def job(config: Pi0Config, row: Row, *, augment: bool) -> Job:
    """Trace the row's step."""
    cameras, key = min(row.cameras, len(config.cameras)), jax.random.key(2)
    counted = replace(config, remat="none", attention="plain")
    make_batch = jax.jit(lambda: batch(config, row.size, cameras, jax.random.key(1)))
    data = jax.eval_shape(make_batch)
    if row.what == "sample":
        # Weights as served: cast and sliced once, not in each call.
        policy, data = Pi0(config), data["observations"]
        half = jax.jit(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy.init(jax.random.key(0))))
        serve = jax.jit(policy.for_inference)  # apart from the random init: faster to compile
        weights = jax.eval_shape(half)
        return Job(
            given=(half.lower(), make_batch.lower()),
            placed=lambda weights, data: (serve(weights), data["observations"]),
            program=jax.jit(sampler(config, row), compiler_options=compiler.for_acting() or None).lower(
                jax.eval_shape(serve, weights), data, key
            ),
            step=None,
            flop=count_flops(sampler(counted, row), weights, data, key),
        )
    agent, mesh = make_agent(config, row, augment=augment), make_mesh()
    state = jax.eval_shape(agent.init, key)
    step = Step(agent, mesh, state)
    init = jax.jit(lambda: agent.init(jax.random.key(0)), out_shardings=state_shardings(mesh, state))
    spread = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=data_sharding(mesh)), data)
    return Job(
        given=(init.lower(), make_batch.lower()),
        placed=lambda state, data: (step.shared(state), jax.device_put(data, data_sharding(mesh))),
        program=step.lower(sharded_shapes(mesh, state), spread, key),
        step=step,
        flop=count_flops(make_agent(counted, row, augment=augment).update, state, data, key),
    )


class Compiled(NamedTuple):
    """A row's compiled programs."""

    run: Any
    """The step."""
    seconds: float
    """Compile time of the step."""
    given: tuple[Any, Any]
    """Programs that make its inputs."""


def compiled(work: Job) -> Compiled:
    """Compile all programs of a row."""
    begin = time.perf_counter()
    run = work.program.compile()
    seconds = time.perf_counter() - begin
    first, second = (program.compile() for program in work.given)
    return Compiled(run, seconds, (first, second))


def program_gib(run: Any) -> float:
    """Memory of a compiled program: arguments, results not aliased with them, temporaries."""
    memory = run.memory_analysis()
    beside = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return float(memory.argument_size_in_bytes + beside + memory.temp_size_in_bytes) / GIB


def measure(work: Job, programs: Compiled, repeats: int) -> dict[str, Any]:
    """Warm up, repeat; returns times, memory and FLOPs."""
    run = programs.run
    found: dict[str, Any] = {"compile_s": programs.seconds, "tflop": work.flop / 1e12}
    if run.memory_analysis() is not None:
        found["gib"] = program_gib(run)
    first, second = programs.given
    (state, data), key = work.placed(first(), second()), jax.random.key(2)
    # As in training, the next step is dispatched before the previous one ends; samples are waited for.
    in_flight, waiting = int(work.step is not None), deque[Any]()
    ends = [time.perf_counter()]
    for index in range(repeats + 1):
        if work.step is None:
            waiting.append(run(state, data, key))
        else:
            state, metrics = work.step(state, data, key, run)
            waiting.append(metrics)
        last = index == repeats or (index > 3 and ends[-1] - ends[0] > LONGEST)
        while len(waiting) > (0 if last else in_flight):
            jax.block_until_ready(waiting.popleft())
            ends.append(time.perf_counter())
        if last:
            break
    times = np.diff(ends)[1:]
    return found | {"seconds": float(np.median(times)), "fastest_s": float(times.min())}


def matmul_rate(size: int = 8192, seconds: float = 2.0) -> float:
    """Sustained FLOP/s of a large bfloat16 GEMM: the practical peak once the GPU is at its power limit."""
    if jax.default_backend() == "cpu":
        size, seconds = 512, 0.1
    x = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.bfloat16))(jax.random.key(0))
    # Several chained GEMMs in one program, so that launch overhead does not count.
    many = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: (x @ y) * jnp.bfloat16(size**-0.5), x))
    jax.block_until_ready(many(x))
    times: list[float] = []
    while sum(times) < seconds:
        begin = time.perf_counter()
        jax.block_until_ready(many(x))
        times.append(time.perf_counter() - begin)
    return 10 * 2 * size**3 / float(np.median(times[len(times) // 2 :]))


Ahead = tuple[Job, Future[Compiled]]
"""A row and its pending compilation."""


def peak_gib() -> float:
    """Peak GiB on the device so far."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB


def attempt(config: Pi0Config, row: Row, args: argparse.Namespace, ahead: Ahead | None) -> dict[str, Any]:
    """The row; without fused attention if it fails with it, and says so."""
    choices: list[Attention] = [config.attention]
    if config.attention != "plain" and attention.kernel(config, config.vlm.head_dim) is not None:
        choices.append("plain")
    errors: dict[str, str] = {}
    for choice in choices:
        try:
            if ahead is not None and not errors:
                work, programs = ahead[0], ahead[1].result()
            else:
                work = job(replace(config, attention=choice), row, augment=args.augment)
                programs = compiled(work)
            found = measure(work, programs, args.repeats)
            return found | {"attention": choice, "errors": errors}
        except Exception as error:
            errors[choice] = f"{type(error).__name__}: {error}"[:2000]
            out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
            # The frames of a failed row hold its state.
            error.__traceback__ = None
        gc.collect()
        jax.clear_caches()
        if out_of_memory:
            break
    return {"errors": errors}


def table(results: dict[str, Any], rate: float) -> Iterator[str]:
    """The results as Markdown."""
    yield "| what | ms | GiB | TFLOP | of the matmul rate | compile s | attention |\n|---|---|---|---|---|---|---|"
    for found in results.values():
        if "seconds" not in found:
            yield f"| {found['what']} | failed: {list(found['errors'].values())[-1].splitlines()[0][:160]} | | | | | |"
            continue
        share = found["tflop"] * 1e12 / found["seconds"] / rate
        yield (
            f"| {found['what']} | {1e3 * found['seconds']:.1f} | {found.get('gib', 0):.1f} | {found['tflop']:.1f} "
            f"| {share:.0%} | {found['compile_s']:.0f} | {found['attention']} |"
        )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="pi0", help="model preset (pi0, pi0_small, pi0_tiny, ...)")
    parser.add_argument("--remat", default="names", choices=("none", "names", "dots", "full"))
    parser.add_argument("--attention", default="auto", choices=("auto", "plain", "xla", "cudnn"))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--augment", action="store_true", help="augment pictures (needs augmax)")
    parser.add_argument("--quick", action="store_true", help="three rows, compiled at the same time")
    parser.add_argument("--list", action="store_true", help="the names of the rows, and nothing else")
    parser.add_argument("--threads", type=int, default=1, help="programs to compile at a time, before any runs")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no row after so many seconds")
    parser.add_argument("--cache", type=Path, help="keep compiled programs in this folder, for a second run")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    args = parser.parse_args()
    args.threads = max(args.threads, 3) if args.quick else args.threads
    unknown = set(filter(None, args.only.split(","))) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; --list names them")
    return args


def main() -> int:
    """Measure and print; writes the results so far after every row."""
    began, args = time.perf_counter(), arguments()
    names = list(filter(None, args.only.split(",")))
    rows = [row for row in ROWS if (row.name in names if names else row.quick or not args.quick)]
    rows.sort(key=lambda row: names.index(row.name) if names else 0)
    if args.list:
        print("\n".join(f"{row.name:18} {row}" for row in rows))
        return 0
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
    base = replace(get_preset(args.preset), remat=args.remat, attention=args.attention)
    rate, device = matmul_rate(), jax.devices()[0]
    head = f"{device.device_kind}, jax {jax.__version__}, {args.preset}, remat {args.remat}, "
    head += f"{'' if args.augment else 'not '}augmented, matmul {rate / 1e12:.0f} TFLOP/s"
    print(head, flush=True)
    results: dict[str, Any] = {}
    configs, ahead = {row.name: sized(base, row) for row in rows}, {}
    if args.threads > 1:
        with ThreadPoolExecutor(args.threads) as pool:
            for row in rows:
                work = job(configs[row.name], row, augment=args.augment)
                ahead[row.name] = work, pool.submit(compiled, work)
        print(f"{len(rows)} programs compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for row in rows:
        if time.perf_counter() - began > args.limit:
            print(f"left out for want of time: {', '.join(r.name for r in rows if r.name not in results)}")
            break
        begin = time.perf_counter()
        found = attempt(configs[row.name], row, args, ahead.pop(row.name, None))
        found |= {"what": str(row), "peak_so_far_gib": peak_gib()}
        results[row.name] = found | {"row_s": time.perf_counter() - begin}
        for choice, error in found["errors"].items():
            print(f"{row.name} with attention {choice}: {error}")
        print(f"{row.name:18} {list(table({'': found}, rate))[-1]}", flush=True)
        gc.collect()
        if not ahead:
            jax.clear_caches()
        report = {"device": device.device_kind, "jax": jax.__version__, "matmul_tflops": rate / 1e12}
        report |= {"arguments": {name: str(value) for name, value in vars(args).items()}, "rows": results}
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
        if args.markdown:
            args.markdown.write_text(f"{head}\n\n" + "\n".join(table(results, rate)) + "\n")
    return int(any("seconds" not in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
