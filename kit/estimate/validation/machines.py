"""The published machines as validation sees them: runs of each, and which of them are held out
together. No torch.
"""

import dataclasses
from collections.abc import Callable, Hashable

import numpy as np

from kit.estimate.fit import fitting, published
from kit.estimate.fit.fitting import Prior, Rows
from kit.estimate.fit.measured_rows import rows_of
from kit.estimate.fit.published import PublishedRun

SMALL = 120
"""Rows of one machine that the population looks at; more do not change it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Published runs of one machine, and what a group of them is."""

    name: str
    runs: tuple[PublishedRun, ...]
    rows: Rows
    groups: tuple[Hashable, ...]
    family: str
    """Machines of one family are held out together."""

    def small(self) -> Rows:
        """Returns at most SMALL of the rows, evenly spaced."""
        step = -(-len(self.rows) // SMALL)
        return self.rows.select(np.arange(0, len(self.rows), step))


Group = Callable[[PublishedRun], Hashable]
Choice = Callable[[PublishedRun], bool]


def size_of(run: PublishedRun) -> Hashable:
    return run.spec.hidden_size


def shape_of(run: PublishedRun) -> Hashable:
    return run.spec.hidden_size, run.spec.num_layers


def _layout(run: PublishedRun) -> Hashable:
    return run.spec.num_layers, run.spec.sequence_length, run.tensor_parallel, run.pipeline_parallel


def _each(run: PublishedRun) -> Hashable:
    return id(run)


def _bridge(device: str) -> Choice:
    return lambda run: "Bridge" in run.source and run.device == device


# What counts as one machine; recalled or second-hand numbers and one mis-configured run are left
# out.
MACHINES: tuple[tuple[str, str, Choice, Group], ...] = (
    (
        "Selene",
        "Selene",
        lambda run: run.system == "Selene" and not run.source.startswith("MT-NLG"),
        _each,
    ),
    ("KAIST multi-node", "KAIST", lambda run: run.system == "KAIST A100 cluster", size_of),
    ("KAIST single node", "KAIST", lambda run: run.system == "KAIST A100 node", size_of),
    ("Aleph Alpha", "Aleph Alpha", lambda run: run.source.startswith("Aleph Alpha"), size_of),
    (
        "Jean Zay",
        "Jean Zay",
        lambda run: run.system == "Jean Zay" and "prequel" in run.source,
        shape_of,
    ),
    (
        "MI250X",
        "MI250X",
        lambda run: (
            run.system in ("Frontier", "LUMI") and run.zero_stage < 3 and run.status != "derived"
        ),
        _each,
    ),
    ("trn1", "trn1", lambda run: run.system == "trn1.32xlarge", _layout),
    ("H100", "Bridge", _bridge("H100"), shape_of),
    ("GB200", "Bridge", _bridge("GB200"), shape_of),
    ("GB300", "Bridge", _bridge("GB300"), shape_of),
)


def machines() -> dict[str, Machine]:
    """Returns the machines of the measured runs that come with the kit."""
    runs, found = [run for run in published.load() if run.kind == "measured"], {}
    for name, family, choice, group in MACHINES:
        own = tuple(run for run in runs if choice(run))
        groups = tuple(group(run) for run in own)
        found[name] = Machine(name=name, family=family, runs=own, rows=rows_of(own), groups=groups)
    return found


def population_without(all_machines: dict[str, Machine], family: str | None) -> Prior:
    """Returns the population of all machines but those of one family."""
    return fitting.population(
        [machine.small() for machine in all_machines.values() if machine.family != family]
    )
