"""Broken copies of rules that a storm must notice, as sabotage.py has them for the chaos run.

That of the lease shows with kills only, and on a machine with processors to spare: else a lost lease has an excuse.
"""

from __future__ import annotations

from .sabotage import Sabotage

SABOTAGES: dict[str, Sabotage] = {
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
