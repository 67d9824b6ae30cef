"""Names of runs and policies on a page: the shortest that are distinct."""

from collections.abc import Sequence

from pirl.report.evaluations import Evaluation
from pirl.report.run import Run


class Names:
    """Names for the runs of a page and for the evaluated policies."""

    def __init__(self, runs: Sequence[Run]) -> None:
        owners = [(run.recipe, run.exp_name) for run in runs]
        whole = [f"{recipe}/{exp_name}" for recipe, exp_name in owners]
        self.runs = _distinct(whole)
        for short in ([recipe for recipe, _ in owners], [exp_name for _, exp_name in owners]):
            if len(runs) > 1 and len(set(short)) == len(short):
                self.runs = short
                break
        self._of = dict(zip(owners, [""] if len(runs) == 1 else self.runs, strict=True))

    def policy(self, evaluation: Evaluation) -> str:
        """Such as `acrlpd_tabletop, step 800`; only the step if the page has a single run."""
        name = self._of.get(evaluation.owner, "/".join(evaluation.owner))
        return f"{name}, {evaluation.policy}" if name else evaluation.policy

    def policies(self, evaluations: Sequence[Evaluation]) -> list[str]:
        """Names of several policies; equal names get a number."""
        return _distinct([self.policy(evaluation) for evaluation in evaluations])


def _distinct(names: Sequence[str]) -> list[str]:
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]
