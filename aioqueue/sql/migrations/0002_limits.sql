-- serves: 2
-- Weights of tenants, limits of running jobs, pauses. held and parked are written by the functions only, like live.

-- What a limit per key counts by.
-- NOT VALID: a check of what stands there would read all of it with the table locked, and it has no key.
ALTER TABLE aioqueue.job ADD COLUMN key text;
ALTER TABLE aioqueue.job ADD CONSTRAINT key_is_a_name CHECK (btrim(key) <> '' AND length(key) <= 200) NOT VALID;

-- Tenants whose share of a lane is not 1.
CREATE TABLE aioqueue.tenant (
    name   text             NOT NULL PRIMARY KEY,
    weight double precision NOT NULL CONSTRAINT weight_is_in_range CHECK (weight BETWEEN 0.01 AND 100)
);

-- All limits of running jobs: of a tenant, of a task, and of each key of a task. While there is none, a claim asks no further.
-- settled: the jobs that ran before it came are counted too (functions/settle_limits.sql).
CREATE TABLE aioqueue.limits (
    key         bigint  NOT NULL PRIMARY KEY,
    kind        text    NOT NULL CONSTRAINT kind_is_known CHECK (kind IN ('tenant', 'task', 'key')),
    name        text    NOT NULL,
    max_running integer CONSTRAINT max_running_is_positive CHECK (max_running >= 1),
    paused      boolean NOT NULL DEFAULT false,
    settled     boolean NOT NULL DEFAULT false,
    UNIQUE (kind, name)
);

-- Queues that are paused: their lanes are left out of claims.
CREATE TABLE aioqueue.queue (
    name   text    NOT NULL PRIMARY KEY,
    paused boolean NOT NULL
);

-- Positions of held and parked, drawn under the key's lock: within a key they come in the order of their commits.
CREATE SEQUENCE aioqueue.pos AS bigint CACHE 1;

-- One row for each running job and limited key: inserted by the claim, deleted by whatever ends the attempt.
CREATE TABLE aioqueue.held (
    key    bigint NOT NULL,
    pos    bigint NOT NULL,
    job_id uuid   NOT NULL,
    worker bigint NOT NULL,
    PRIMARY KEY (key, pos)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX held_job ON aioqueue.held (job_id);

-- Ready jobs that a claim found to be over a limit, under the first key that was full. rule is that limit's key in limits.
CREATE TABLE aioqueue.parked (
    key     bigint  NOT NULL,
    pos     bigint  NOT NULL,
    job_id  uuid    NOT NULL,
    rule    bigint  NOT NULL,
    lane    bigint  NOT NULL,
    tenant  text    NOT NULL,
    attempt integer NOT NULL,
    spared  integer NOT NULL,
    PRIMARY KEY (key, pos)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX parked_job ON aioqueue.parked (job_id);

CREATE OR REPLACE VIEW aioqueue.jobs AS
SELECT j.id, j.task, j.queue, j.priority, nullif(j.tenant, '') AS tenant,
       CASE WHEN o.job_id IS NOT NULL THEN o.state
            WHEN l.worker IS NOT NULL THEN 'running'
            WHEN l.job_id IS NOT NULL OR p.job_id IS NOT NULL THEN 'ready'
            WHEN s.job_id IS NOT NULL THEN 'scheduled' END AS state,
       coalesce(o.attempt, l.attempt, s.attempt, p.attempt) AS attempt,
       coalesce(o.spared, l.spared, s.spared, p.spared) AS spared,
       j.max_attempts, j.created_at, coalesce(s.run_at, j.run_at) AS run_at,
       coalesce(o.started_at, l.claimed_at) AS started_at, o.finished_at, l.worker,
       j.payload, o.result, a.reason, a.error_type, coalesce(o.message, a.error_message) AS error, s.unknown_task, j.retry_of,
       j.key, p.job_id IS NOT NULL AS parked
  FROM aioqueue.job j
  LEFT JOIN aioqueue.outcome o ON o.job_id = j.id
  LEFT JOIN aioqueue.live l ON l.job_id = j.id
  LEFT JOIN aioqueue.scheduled s ON s.job_id = j.id
  LEFT JOIN aioqueue.parked p ON p.job_id = j.id
  LEFT JOIN LATERAL (SELECT * FROM aioqueue.attempt a WHERE a.job_id = j.id ORDER BY a.attempt DESC LIMIT 1) a ON true;

-- Functions whose parameters or results change.
DROP FUNCTION IF EXISTS aioqueue.claim(bigint, bigint[], bigint[], uuid[], integer[], integer[], integer);
DROP FUNCTION IF EXISTS aioqueue.enqueue(text, jsonb, text, text, integer, interval, timestamptz, integer, uuid);
DROP FUNCTION IF EXISTS aioqueue.unknown_claims(bigint, uuid[]);
DROP FUNCTION IF EXISTS aioqueue.next_tag(bigint, text);
DROP FUNCTION IF EXISTS aioqueue.tick(bigint, bigint[], bigint[], bigint[], uuid[], bigint[], timestamptz, timestamptz);
