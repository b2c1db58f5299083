-- serves: 1
-- Tables of the storage engine. Rows enter live and scheduled through the functions only; no role but the owner writes here.
-- job, outcome and attempt are append-only and partitioned by id time, so that retention can drop whole ranges; the
-- DEFAULT partition takes what no range covers. live and scheduled hold what is unfinished, one narrow row per job.

-- What was asked for; never changed. tenant '' means none.
CREATE TABLE aioqueue.job (
    id           uuid        NOT NULL,
    task         text        NOT NULL CONSTRAINT task_is_a_name     CHECK (btrim(task) <> '' AND length(task) <= 200),
    queue        text        NOT NULL CONSTRAINT queue_is_a_name    CHECK (btrim(queue) <> '' AND length(queue) <= 200),
    tenant       text        NOT NULL CONSTRAINT tenant_is_a_name   CHECK (tenant = '' OR btrim(tenant) <> '' AND length(tenant) <= 200),
    priority     smallint    NOT NULL CONSTRAINT priority_is_a_level CHECK (priority BETWEEN -2 AND 2),
    max_attempts integer     NOT NULL CONSTRAINT max_attempts_is_positive CHECK (max_attempts BETWEEN 1 AND 10000),
    payload      jsonb       NOT NULL,
    created_at   timestamptz NOT NULL,
    run_at       timestamptz,
    retry_of     uuid,
    PRIMARY KEY (id)
) PARTITION BY RANGE (id);
CREATE TABLE aioqueue.job_default PARTITION OF aioqueue.job DEFAULT;

-- Due and unfinished. A claim is a HOT update of one row (no changed column is indexed, fillfactor leaves room for the
-- new version in the page); the end of a job deletes it. The claim is the only UPDATE of this table.
CREATE TABLE aioqueue.live (
    lane       bigint      NOT NULL,
    vt         bigint      NOT NULL,
    job_id     uuid        NOT NULL,
    tenant     text        NOT NULL,
    attempt    integer     NOT NULL DEFAULT 0,
    spared     integer     NOT NULL DEFAULT 0,
    worker     bigint,
    claimed_at timestamptz,
    PRIMARY KEY (lane, vt, job_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX live_tenant ON aioqueue.live (lane, tenant, vt);
CREATE INDEX live_job ON aioqueue.live (job_id);

-- Not yet due: scheduled jobs, retries that wait, jobs of a task that no worker knew.
CREATE TABLE aioqueue.scheduled (
    run_at       timestamptz NOT NULL,
    job_id       uuid        NOT NULL,
    lane         bigint      NOT NULL,
    tenant       text        NOT NULL,
    attempt      integer     NOT NULL DEFAULT 0,
    spared       integer     NOT NULL DEFAULT 0,
    unknown_task text,
    PRIMARY KEY (run_at, job_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX scheduled_job ON aioqueue.scheduled (job_id);
CREATE INDEX scheduled_unknown_task ON aioqueue.scheduled (unknown_task, job_id) WHERE unknown_task IS NOT NULL;

-- How a job ended: succeeded, dead or cancelled. The primary key is a second fence against two ends of one job.
CREATE TABLE aioqueue.outcome (
    job_id      uuid        NOT NULL,
    state       text        NOT NULL,
    attempt     integer     NOT NULL,
    spared      integer     NOT NULL,
    result      jsonb,
    message     text,
    started_at  timestamptz,
    finished_at timestamptz NOT NULL,
    PRIMARY KEY (job_id)
) PARTITION BY RANGE (job_id);
CREATE TABLE aioqueue.outcome_default PARTITION OF aioqueue.outcome DEFAULT;
CREATE INDEX outcome_unsuccessful ON aioqueue.outcome (state, finished_at) WHERE state <> 'succeeded';

-- One row for every attempt that did not end in the job's own success.
CREATE TABLE aioqueue.attempt (
    job_id        uuid        NOT NULL,
    attempt       integer     NOT NULL,
    reason        text        NOT NULL,
    error_type    text,
    error_message text,
    traceback     text,
    worker        bigint,
    started_at    timestamptz,
    finished_at   timestamptz NOT NULL,
    PRIMARY KEY (job_id, attempt)
) PARTITION BY RANGE (job_id);
CREATE TABLE aioqueue.attempt_default PARTITION OF aioqueue.attempt DEFAULT;

-- Requests to cancel a running job, read by its worker.
CREATE TABLE aioqueue.cancel (
    job_id       uuid        NOT NULL PRIMARY KEY,
    worker       bigint      NOT NULL,
    requested_at timestamptz NOT NULL
);
CREATE INDEX cancel_worker ON aioqueue.cancel (worker);

-- One row per worker process start, under a random 63-bit identity: one lease per worker, not per job.
CREATE TABLE aioqueue.worker (
    id          bigint      NOT NULL PRIMARY KEY,
    host        text        NOT NULL,
    pid         integer     NOT NULL,
    version     text        NOT NULL,
    queues      text[]      NOT NULL,
    concurrency integer     NOT NULL,
    running     integer     NOT NULL DEFAULT 0,
    problems    text[]      NOT NULL DEFAULT '{}',
    started_at  timestamptz NOT NULL,
    beat_at     timestamptz NOT NULL,
    lease_until timestamptz NOT NULL,
    dead        boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- The defaults of each task, written by workers at start, for clients that name only the task.
CREATE TABLE aioqueue.task (
    name         text        NOT NULL PRIMARY KEY,
    queue        text        NOT NULL,
    priority     smallint    NOT NULL,
    max_attempts integer     NOT NULL,
    seen_at      timestamptz NOT NULL
);

-- Virtual time of the lanes: 1,024 cells that are not MVCC; a lane uses the one of its low 10 bits (functions/virtual_time.sql).
DO $$
BEGIN
    FOR cell IN 0..1023 LOOP
        EXECUTE format('CREATE SEQUENCE aioqueue.v%s AS bigint MINVALUE 0 START 0 CACHE 1', cell);
    END LOOP;
END $$;

-- For people: every job with its state.
CREATE VIEW aioqueue.jobs AS
SELECT j.id, j.task, j.queue, j.priority, nullif(j.tenant, '') AS tenant,
       CASE WHEN o.job_id IS NOT NULL THEN o.state
            WHEN l.worker IS NOT NULL THEN 'running'
            WHEN l.job_id IS NOT NULL THEN 'ready'
            WHEN s.job_id IS NOT NULL THEN 'scheduled' END AS state,
       coalesce(o.attempt, l.attempt, s.attempt) AS attempt,
       coalesce(o.spared, l.spared, s.spared) AS spared,
       j.max_attempts, j.created_at, coalesce(s.run_at, j.run_at) AS run_at,
       coalesce(o.started_at, l.claimed_at) AS started_at, o.finished_at, l.worker,
       j.payload, o.result, a.reason, a.error_type, coalesce(o.message, a.error_message) AS error, s.unknown_task, j.retry_of
  FROM aioqueue.job j
  LEFT JOIN aioqueue.outcome o ON o.job_id = j.id
  LEFT JOIN aioqueue.live l ON l.job_id = j.id
  LEFT JOIN aioqueue.scheduled s ON s.job_id = j.id
  LEFT JOIN LATERAL (SELECT * FROM aioqueue.attempt a WHERE a.job_id = j.id ORDER BY a.attempt DESC LIMIT 1) a ON true;
