-- serves: 5
-- How far running jobs are. Append-only per attempt: each report is a new row with the next number, and the one before is deleted
-- by its key, so that neither a report nor a look walks over what was written before, whatever horizon is held. A row counts
-- only beside the live row of its own claim (functions/follow.sql): what is left behind is seen by nobody.
-- Unlogged: a report costs no WAL and no flush; a crash of the server loses the reports, and the next one comes a moment later.
CREATE UNLOGGED TABLE aioqueue.progress (
    job_id      uuid             NOT NULL,
    attempt     integer          NOT NULL,
    number      integer          NOT NULL,
    worker      bigint           NOT NULL,
    value       double precision NOT NULL CONSTRAINT value_is_a_share CHECK (value BETWEEN 0 AND 1),
    message     text             CONSTRAINT message_is_short CHECK (length(message) <= 500),
    reported_at timestamptz      NOT NULL,
    PRIMARY KEY (job_id, attempt, number)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
