-- settle_limits: makes limits and pauses that were just committed good for all that runs: waits for the claims in flight,
-- which may not have seen them, and writes held rows for jobs that run without. Afterwards no claim breaks them.
-- In a short transaction of its own: claims wait for its exclusive lock. Then locks the keys concerned. Reads live once, for the
-- jobs that run, unless all limits are settled; then, without p_wait, it does not wait for claims either.
CREATE OR REPLACE FUNCTION aioqueue.settle_limits(p_wait boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    keys bigint[]; jobs uuid[]; workers bigint[];
BEGIN
    IF NOT p_wait AND NOT EXISTS (SELECT FROM aioqueue.limits r WHERE NOT r.settled) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('aioqueue.settle_limits', 0));
    IF NOT EXISTS (SELECT FROM aioqueue.limits r WHERE NOT r.settled) THEN
        RETURN;
    END IF;
    SELECT array_agg(x.key), array_agg(x.job_id), array_agg(x.worker) INTO keys, jobs, workers
      FROM (SELECT CASE WHEN r.kind = 'key' THEN aioqueue.limit_key('key', j.task, j.key) ELSE r.key END AS key, l.job_id, l.worker
              FROM aioqueue.live l
              JOIN aioqueue.job j ON j.id = l.job_id
              JOIN aioqueue.limits r ON NOT r.settled AND (
                       r.kind = 'tenant' AND r.name = l.tenant OR r.kind = 'task' AND r.name = j.task
                    OR r.kind = 'key' AND r.name = j.task AND j.key IS NOT NULL)
             WHERE l.worker IS NOT NULL) x
     WHERE NOT EXISTS (SELECT FROM aioqueue.held h WHERE h.job_id = x.job_id AND h.key = x.key);
    IF keys IS NOT NULL THEN
        PERFORM aioqueue.lock_keys(keys);
        INSERT INTO aioqueue.held (key, pos, job_id, worker)
        SELECT u.key, nextval('aioqueue.pos'::regclass), u.job_id, u.worker FROM unnest(keys, jobs, workers) AS u (key, job_id, worker);
    END IF;
    UPDATE aioqueue.limits r SET settled = true WHERE NOT r.settled;
END $$;
