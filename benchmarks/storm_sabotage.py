"""Broken copies of rules that a storm must notice, as sabotage.py has them for the chaos run."""

from __future__ import annotations

from .sabotage import Sabotage

_FENCE = "WHERE l.lane = p_lane AND l.vt = p_vt AND l.job_id = p_job_id AND l.worker = p_worker AND l.attempt = p_attempt\n"

SABOTAGES: dict[str, Sabotage] = {
    "fence": Sabotage(
        "only the owner of a job's newest claim finishes it",
        {"finish": ((_FENCE, "WHERE l.job_id = p_job_id\n"),)},
    ),
    "lease": Sabotage(
        "nobody is taken for dead before the lease ends",
        {"rescue": (("k.lease_until < clock_timestamp()", "k.lease_until < clock_timestamp() + interval '1.8 s'"),)},
    ),
    "losses-count": Sabotage(
        "an attempt that is lost with its worker counts",
        {"rescue_job": (("END, false, NULL);", "END, true, NULL);"),)},
    ),
    "rescue": Sabotage(
        "jobs of the dead are taken over",
        {"rescue": (("(k.dead OR k.lease_until < clock_timestamp())", "false"),)},
    ),
    "tenant": Sabotage(
        "a job runs for its own tenant",
        {"claim": (("nullif(c.tenant, '')", "reverse(nullif(c.tenant, ''))"),)},
    ),
}
