-- rescue_orphans: as rescue, for running rows whose worker has no row at all (deleted by hand, lost in a failover).
-- Scans live, so it is called at a worker's start and about once a minute, by one worker at a time (a try-lock).
CREATE OR REPLACE FUNCTION aioqueue.rescue_orphans(p_limit integer, p_held jsonb DEFAULT '{}', p_parked jsonb DEFAULT '{}') RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    r aioqueue.live; moved integer := 0; freed bigint[] := '{}';
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.rescue_orphans', 0)) THEN
        RETURN 0;
    END IF;
    PERFORM pg_current_xact_id();
    FOR r IN SELECT l.* FROM aioqueue.live l
              WHERE l.worker IS NOT NULL AND NOT EXISTS (SELECT FROM aioqueue.worker w WHERE w.id = l.worker)
              LIMIT p_limit FOR UPDATE OF l SKIP LOCKED LOOP
        freed := freed || ARRAY(SELECT h.key FROM aioqueue.held h WHERE h.job_id = r.job_id);
        PERFORM aioqueue.rescue_job(r);
        moved := moved + 1;
    END LOOP;
    PERFORM aioqueue.unpark_freed(freed, p_held, p_parked);
    RETURN moved;
END $$;
