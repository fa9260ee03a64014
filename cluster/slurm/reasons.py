"""Explains the reasons for which a Slurm job waits, and what its user can do.

Slurm has more than 200 reasons. Nearly all reasons about limits are named by one scheme. A `Family`
therefore groups reasons by a pattern of their names. The first family in FAMILIES that matches a
reason applies.

Sources: https://slurm.schedmd.com/job_reason_codes.html, and in Slurm's source the names
(src/common/job_state_reason.c) and the comparisons that set them (src/slurmctld/acct_policy.c).
"""

import dataclasses
import re
from typing import Literal

Verdict = Literal["waits", "waits for a grant", "never starts"]
PREFIXES: dict[Verdict, str] = {
    "waits": "waits",
    "waits for a grant": "waits, and will not start before more is granted",
    "never starts": "waits, and will not start",
}
"""Beginning of the line that a user reads about a waiting job, by `Family.verdict`."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A group of Slurm's reasons that mean the same for the user."""

    verdict: Verdict
    """`waits`: the job starts when other jobs end or nodes become free. `waits for a grant`: the
    budget of the account is used up. `never starts`: the job or the cluster must be changed
    first."""
    pattern: str
    """Regular expression that matches the whole reason code."""
    meaning: str
    """Clause for the user that says why the job waits."""
    remedy: str = ""
    """Sentence that says what the user can do. Empty if the user can only wait. `{job}` is replaced
    by the job id."""


ASK_FOR_LESS = "Cancel it, ask for fewer nodes, GPUs or less time, submit again."
OTHER_ACCOUNT = "Cancel it, give another account, qos or partition in the site file, submit again."
OTHER_PARTITION = "Wait until an administrator starts it, or cancel the job and give another one."
OTHERS_END = "It starts when some of them have ended, unless it alone asks for more."
RELEASE = "`scontrol release {job}` lets it go."
FAMILIES = (
    Family("waits", "Priority", "jobs of higher priority are first"),
    Family("waits", "Resources", "no nodes are free yet"),
    Family("waits", "BeginTime", "its earliest start time has not come"),
    Family("waits", "Dependency", "another job must end first"),
    Family("waits", "Licenses", "all licenses that it asks for are in use"),
    Family("waits", "Reservation", "its reservation has not begun, or is in use"),
    Family(
        "waits",
        "ReqNodeNotAvail|NodeDown|FrontEndDown|Nodes required for job are DOWN",
        "its nodes are down or reserved",
    ),
    Family("waits", "Constraints", "no free node has what it asks for"),
    Family("waits", "MpiPortsBusy|NvidiaImexChannels", "ports or channels of its nodes are in use"),
    Family("waits", "Power.*|MaxPoweredUpNodes", "no electric power is left for its nodes"),
    Family("waits", "JobArrayTaskLimit", "as many tasks of its array run as may run at once"),
    Family(
        "waits",
        "Prolog|Cleaning|SchedDefer|FedJobLock|BurstBuffer(Resources|StageIn)",
        "Slurm prepares its start",
    ),
    Family(
        "waits",
        "NonZeroExitCode|RaisedSignal|TimeLimit|InactiveLimit|OutOfMemory|SystemFailure",
        "its last start ended so, and it waits for the next one",
    ),
    # Limits on one job. They come before the limits of users and groups, since a name such as
    # AssocMaxCpuMinutesPerJobLimit contains words of both kinds of limits.
    Family(
        "never starts",
        "(Assoc|QOS|)Max.*Wall.*PerJob.*",
        "one job of this account or qos may not run so long",
        "Cancel it, ask for less time, submit again.",
    ),
    Family(
        "never starts",
        "(Assoc|QOS|)Max.*Min(ute)?s.*PerJob.*",
        "one job of this account or qos may not use so much for so long",
        ASK_FOR_LESS,
    ),
    Family(
        "never starts",
        "(Assoc|QOS|)Max.*Per(Job|Node).*",
        "it asks for more than one job of this account or qos may have",
        ASK_FOR_LESS,
    ),
    Family(
        "never starts",
        "MaxMemPerLimit",
        "it asks for more memory per CPU or node than the cluster or partition allows",
        "Cancel it, ask for less memory (--mem in site.slurm.sbatch_options), submit again.",
    ),
    Family(
        "never starts",
        "QOSMin.*",
        "it asks for less than a job of its qos must have",
        "Cancel it, ask for more or give another qos in the site file, submit again.",
    ),
    # Limits on all jobs of a user or of a group together.
    Family(
        "waits",
        "(Assoc|QOS)Grp.*RunMin(ute)?s.*",
        "the running jobs of the account or qos have as many minutes left as they may have",
        OTHERS_END,
    ),
    Family(
        "waits for a grant",
        "(Assoc|QOS)Grp(.*Min(ute)?s|Wall).*|AssociationTimeLimit|QOSTimeLimit|QOSUsageThreshold",
        "the account or qos has used up its budget",
        "Ask for more, or cancel it and give another account or qos in the site file.",
    ),
    Family(
        "waits",
        "(Assoc|QOS)Grp.*|Association(Job|Resource)Limit|QOS(Job|Resource)Limit",
        "the jobs of the account or qos together have as much as they may have",
        OTHERS_END,
    ),
    Family(
        "waits",
        "(QOS|)Max.*Per(User|Account).*|AssocMax(Jobs|SubmitJob).*|QOSMaxSubmitJob.*",
        "the jobs of its user or account together have as much as they may have",
        OTHERS_END,
    ),
    Family(
        "waits",
        "AccountingPolicy",
        "a limit of the account or qos is reached",
        "`sacctmgr show associations user=$USER` and `sacctmgr show qos` show the limits.",
    ),
    # Requests that the partition or account does not allow, and requests that no node can meet.
    Family(
        "never starts",
        "PartitionTimeLimit",
        "no job of this partition may run so long",
        "Cancel it, ask for less time, submit again.",
    ),
    Family(
        "never starts",
        "PartitionNodeLimit|PartitionConfig",
        "no job of this partition may have so many nodes or so much time",
        ASK_FOR_LESS,
    ),
    Family("never starts", "PartitionDown", "the partition does not start jobs", OTHER_PARTITION),
    Family("never starts", "PartitionInactive", "the partition takes no jobs", OTHER_PARTITION),
    Family(
        "never starts",
        "BadConstraints",
        "no node has what it asks for",
        "Cancel it, change what it asks for, submit again.",
    ),
    Family(
        "never starts",
        "DependencyNeverSatisfied",
        "the job that it waits for has failed or never was",
        "Cancel it, submit again.",
    ),
    Family(
        "never starts",
        "InvalidAccount|AccountNotAllowed",
        "the account may not run jobs in this partition",
        OTHER_ACCOUNT,
    ),
    Family(
        "never starts",
        "InvalidQOS|QOSNotAllowed",
        "the quality of service may not be used here",
        OTHER_ACCOUNT,
    ),
    Family(
        "never starts",
        "Reservation(Deleted|Invalid)",
        "its reservation does not exist",
        "Cancel it, give another reservation or none, submit again.",
    ),
    Family(
        "never starts",
        "DeadLine",
        "it cannot end before its deadline",
        "Cancel it, ask for less time or a later deadline, submit again.",
    ),
    # Reasons of held jobs.
    Family("never starts", "JobHeldUser|job requeued in held state", "it is held", RELEASE),
    Family(
        "never starts",
        "JobHeldAdmin",
        "an administrator holds it",
        "Ask the administrators of the cluster.",
    ),
    Family(
        "never starts",
        "JobHoldMaxRequeue",
        "it was put back into the queue too often and is held",
        RELEASE,
    ),
    Family(
        "never starts",
        "JobLaunchFailure|launch failed requeued held|BurstBufferOperation",
        "it could not be started and is held",
        "`scontrol release {job}` tries again. The administrators can tell why it failed.",
    ),
)


def family_of(reason: str) -> Family | None:
    """Returns the family of a reason as squeue prints it, or None for an unknown reason.

    Some reasons are followed by details, as in `ReqNodeNotAvail, UnavailableNodes:node[1-2]`.
    """
    code = reason.partition(",")[0].replace("_", " ").strip()
    return next((each for each in FAMILIES if re.fullmatch(each.pattern, code, re.I)), None)


def why_it_waits(reason: str, job_id: str) -> str:
    """Returns one line for the user about a waiting job: the reason, its meaning, and what to do.

    An unknown reason is printed unchanged.
    """
    if reason in ("None", ""):
        return "waits to be scheduled"
    family = family_of(reason)
    if family is None:
        return f"waits: {reason}"
    remedy = f". {family.remedy.format(job=job_id)}" if family.remedy else ""
    return f"{PREFIXES[family.verdict]}: {reason} ({family.meaning}){remedy}"
