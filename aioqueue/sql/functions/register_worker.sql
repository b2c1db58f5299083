-- register_worker: (nothing) → a living worker, under an identity that the process made; writes what its tasks default to,
-- and makes jobs that waited for one of these tasks due at once: the first 10,000, which take a moment; the others fall due
-- by themselves within a minute. Served by scheduled_unknown_task.
-- p_connections: how many it has of the server's at most; NULL: unknown.
-- p_tasks: [{"name", "queue", "priority", "max_attempts", "require_tenant", "max_running", "max_running_per_key"}, …]. Task rows, and their limits
-- (both may be null or missing: none), are written in name order, and only when changed; to be settled after the commit.
CREATE OR REPLACE FUNCTION aioqueue.register_worker(
    p_worker bigint, p_host text, p_pid integer, p_version text, p_queues text[], p_concurrency integer,
    p_lease double precision, p_tasks jsonb, p_connections integer DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE at timestamptz; each record;
BEGIN
    PERFORM pg_current_xact_id();
    at := clock_timestamp();
    INSERT INTO aioqueue.worker (id, host, pid, version, queues, concurrency, connections, role, started_at, beat_at, lease_until)
    VALUES (p_worker, p_host, p_pid, p_version, p_queues, p_concurrency, p_connections, session_user, at, at, at + make_interval(secs => p_lease));
    INSERT INTO aioqueue.task AS t (name, queue, priority, max_attempts, require_tenant, seen_at)
    SELECT e.name, e.queue, e.priority, e.max_attempts, coalesce(e.require_tenant, false), at
      FROM jsonb_to_recordset(p_tasks) AS e (name text, queue text, priority smallint, max_attempts integer, require_tenant boolean) ORDER BY e.name
    ON CONFLICT (name) DO UPDATE SET queue = excluded.queue, priority = excluded.priority, max_attempts = excluded.max_attempts,
           require_tenant = excluded.require_tenant, seen_at = at
       WHERE (t.queue, t.priority, t.max_attempts, t.require_tenant)
             IS DISTINCT FROM (excluded.queue, excluded.priority, excluded.max_attempts, excluded.require_tenant)
          OR t.seen_at < at - interval '1 hour';
    FOR each IN SELECT e.name, e.max_running, e.max_running_per_key
               FROM jsonb_to_recordset(p_tasks) AS e (name text, max_running integer, max_running_per_key integer) ORDER BY e.name LOOP
        PERFORM aioqueue.set_limit('key', each.name, each.max_running_per_key, false);
        PERFORM aioqueue.set_limit('task', each.name, each.max_running, false);
    END LOOP;
    WITH d AS (
        DELETE FROM aioqueue.scheduled s WHERE s.ctid = ANY (ARRAY(
               SELECT x.c FROM jsonb_to_recordset(p_tasks) AS e (name text),
                      LATERAL (SELECT y.ctid AS c FROM aioqueue.scheduled y WHERE y.unknown_task = e.name) x LIMIT 10000))
        RETURNING s.*)
    INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant, attempt, spared)
    SELECT clock_timestamp(), d.job_id, d.lane, d.tenant, d.attempt, d.spared FROM d;
END $$;
