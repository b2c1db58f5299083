"""Log records know their job: a filter for handlers that gives each record the job it was emitted in.

Sets up no logging and changes no logger; who has a handler adds the filter to it.
"""

from __future__ import annotations

import logging

from .context import current_job


class JobLogFilter(logging.Filter):
    """Gives every record `job_id`, `task`, `tenant`, `attempt`, `queue`, `worker` of the job that it was emitted in, else None.

    `job` is all of them as one text to end a line with, empty outside. What a record has already stays. Add it to a handler
    (`handler.addFilter(JobLogFilter())`): filters of loggers do not see the records of other loggers.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; let every record pass."""
        facts = current_job()
        if facts is None:
            given = dict.fromkeys(("job_id", "task", "tenant", "attempt", "queue", "worker")) | {"job": ""}
        else:
            tenant = str(facts.tenant or "") or None
            given = {
                "job_id": str(facts.job_id), "task": facts.task, "tenant": tenant, "attempt": facts.attempt,
                "queue": facts.queue, "worker": facts.worker,
            }  # fmt: skip
            of = "" if tenant is None else f", tenant {tenant}"
            given["job"] = f" [{facts.task} {facts.job_id}, attempt {facts.attempt}{of}]"
        for name, value in given.items():
            record.__dict__.setdefault(name, value)
        return True
