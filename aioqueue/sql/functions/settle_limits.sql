-- settle_limits: makes limits that came count what runs already: writes held rows for jobs that run without.
-- p_seen: what wait_for_claims returned, {key: version}. Claims that began before have ended, and those that began after it
-- write held rows of their own. Only these limits are settled, and only if nobody has changed them since: one that is
-- newer has claims in flight that may not have seen it.
-- In a transaction of its own. Locks the limits' rows first (p_wait false: leaves out those that somebody has locked), then the
-- keys of the jobs that run, the last thing that is waited for. Under these locks, live is asked again in a NEW statement, since
-- a job may have ended or changed hands meanwhile. An end that is not committed yet did not see the row that is written
-- here, and leaves it behind: sweep_parked deletes it.
-- Reads live once; nothing waits for that but the unparking of the same keys. Served by job_pkey, live_job, held_job, limits_kind_name_key.
CREATE OR REPLACE FUNCTION aioqueue.settle_limits(p_seen jsonb, p_wait boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    rules bigint[]; keys bigint[]; jobs uuid[]; workers bigint[];
BEGIN
    IF p_wait THEN
        SELECT array_agg(x.key) INTO rules FROM (
            SELECT r.key FROM aioqueue.limits r WHERE NOT r.settled AND p_seen ->> r.key::text = r.xmin::text ORDER BY r.key FOR UPDATE) x;
    ELSE
        SELECT array_agg(x.key) INTO rules FROM (
            SELECT r.key FROM aioqueue.limits r WHERE NOT r.settled AND p_seen ->> r.key::text = r.xmin::text ORDER BY r.key
               FOR UPDATE SKIP LOCKED) x;
    END IF;
    SELECT array_agg(x.key), array_agg(x.job_id), array_agg(x.worker) INTO keys, jobs, workers
      FROM (SELECT CASE WHEN k.kind = 'key' THEN aioqueue.limit_key('key', j.task, j.key) ELSE r.key END AS key, l.job_id, l.worker
              FROM aioqueue.live l,
                   LATERAL (SELECT b.task, b.key FROM aioqueue.job b WHERE b.id = l.job_id LIMIT 1) j,
                   LATERAL (VALUES ('key', j.task), ('task', j.task), ('tenant', l.tenant)) AS k (kind, name),
                   LATERAL (SELECT s.key FROM aioqueue.limits s WHERE s.kind = k.kind AND s.name = k.name AND s.key = ANY (rules) LIMIT 1) r
             WHERE l.worker IS NOT NULL AND (k.kind <> 'key' OR j.key IS NOT NULL)) x
     WHERE NOT EXISTS (SELECT FROM aioqueue.held h WHERE h.job_id = x.job_id AND h.key = x.key);
    IF keys IS NOT NULL THEN
        PERFORM aioqueue.lock_keys(keys);
        INSERT INTO aioqueue.held (key, pos, job_id, worker)
        SELECT u.key, nextval('aioqueue.pos'::regclass), u.job_id, u.worker
          FROM unnest(keys, jobs, workers) AS u (key, job_id, worker),
               LATERAL (SELECT FROM aioqueue.live l WHERE l.job_id = u.job_id AND l.worker = u.worker LIMIT 1) l
         WHERE NOT EXISTS (SELECT FROM aioqueue.held h WHERE h.job_id = u.job_id AND h.key = u.key);
    END IF;
    UPDATE aioqueue.limits r SET settled = true WHERE r.key = ANY (rules);
END $$;
