-- resign: a worker that stops says so. Its row goes; if it left running jobs behind, the row stays, dead, and the next pass
-- of rescue takes them. The row is locked FOR UPDATE first, so no claim of it is in flight, and none can follow.
-- Scans live once, at the end of a worker.
CREATE OR REPLACE FUNCTION aioqueue.resign(p_worker bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
BEGIN
    UPDATE aioqueue.worker w SET dead = true, lease_until = least(w.lease_until, clock_timestamp()) WHERE w.id = p_worker;
    PERFORM FROM aioqueue.worker w WHERE w.id = p_worker FOR UPDATE;
    IF NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.worker = p_worker) THEN
        DELETE FROM aioqueue.cancel c WHERE c.worker = p_worker;
        DELETE FROM aioqueue.held h WHERE h.worker = p_worker;  -- none, but for what settle_limits has left
        DELETE FROM aioqueue.worker w WHERE w.id = p_worker;
    END IF;
END $$;
