-- rescue: running → ready, scheduled, dead or cancelled, for the jobs of ONE dead worker, up to p_limit; never p_worker's own.
-- Dead: said so, or its lease has ended by the database's clock. Its row is locked FOR UPDATE SKIP LOCKED before it is
-- marked dead: no claim of it is in flight then, and none can follow. It stays on the list until a pass finds no live row
-- of it; the row goes in that pass. The first loss of a job is ready at once; from the second on with back-off.
-- The limited keys that they held are free, and as many parked jobs are made ready, last (unpark_freed); p_held, p_parked: as unpark's.
-- Which of the dead is left to chance, so that one whose last row stays locked holds up no other.
-- Safe to run in parallel. Returns the worker looked at, the number of jobs moved and their ids; no row: nobody is dead.
-- The one statement that scans live by worker, and only when one is dead.
CREATE OR REPLACE FUNCTION aioqueue.rescue(
    p_worker bigint, p_limit integer, p_held jsonb DEFAULT '{}', p_parked jsonb DEFAULT '{}'
) RETURNS TABLE (worker bigint, moved integer, job_ids uuid[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
#variable_conflict use_column
DECLARE
    w bigint; was_dead boolean; r aioqueue.live; freed bigint[] := '{}';
BEGIN
    PERFORM pg_current_xact_id();
    SELECT k.id, k.dead INTO w, was_dead FROM aioqueue.worker k
     WHERE k.id <> p_worker AND (k.dead OR k.lease_until < clock_timestamp()) ORDER BY k.dead, random() LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF NOT was_dead THEN
        UPDATE aioqueue.worker k SET dead = true WHERE k.id = w;
    END IF;
    worker := w; moved := 0; job_ids := '{}';
    FOR r IN SELECT l.* FROM aioqueue.live l WHERE l.worker = w LIMIT p_limit FOR UPDATE SKIP LOCKED LOOP
        freed := freed || ARRAY(SELECT h.key FROM aioqueue.held h WHERE h.job_id = r.job_id);
        PERFORM aioqueue.rescue_job(r);
        moved := moved + 1;
        job_ids := job_ids || r.job_id;
    END LOOP;
    IF moved = 0 AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.worker = w) THEN
        DELETE FROM aioqueue.cancel c WHERE c.worker = w;
        DELETE FROM aioqueue.held h WHERE h.worker = w;  -- what settle_limits may have left
        DELETE FROM aioqueue.worker k WHERE k.id = w;
    END IF;
    PERFORM aioqueue.unpark_freed(freed, p_held, p_parked);
    RETURN NEXT;
END $$;
