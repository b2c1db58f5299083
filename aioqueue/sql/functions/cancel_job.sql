-- cancel_job: scheduled, ready or parked → cancelled at once; running → a request that its worker reads with its next tick.
-- In the caller's transaction. Returns the state after it ('running': asked for), or NULL for a job unknown to the tenant
-- (p_tenant NULL: any tenant). A job that has ended keeps its end. Locks one row; served by scheduled_job, live_job, parked_job.
-- A job that moves between these tables meanwhile is looked for again, a few times.
CREATE OR REPLACE FUNCTION aioqueue.cancel_job(p_job_id uuid, p_tenant text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    r aioqueue.live; waited integer; spares integer; ended text;
BEGIN
    PERFORM FROM aioqueue.job j WHERE j.id = p_job_id AND (p_tenant IS NULL OR j.tenant = p_tenant);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    FOR try IN 1..10 LOOP
        SELECT o.state INTO ended FROM aioqueue.outcome o WHERE o.job_id = p_job_id;
        IF FOUND THEN
            RETURN ended;
        END IF;
        SELECT l.* INTO r FROM aioqueue.live l WHERE l.job_id = p_job_id FOR UPDATE;
        IF FOUND AND r.worker IS NULL THEN
            RETURN aioqueue.end_job(r, 'cancelled', 'cancelled before it ran');
        ELSIF FOUND THEN
            INSERT INTO aioqueue.cancel (job_id, worker, requested_at) VALUES (p_job_id, r.worker, clock_timestamp()) ON CONFLICT DO NOTHING;
            RETURN 'running';
        END IF;
        DELETE FROM aioqueue.scheduled x WHERE x.job_id = p_job_id RETURNING x.attempt, x.spared INTO waited, spares;
        IF NOT FOUND THEN
            DELETE FROM aioqueue.parked x WHERE x.job_id = p_job_id RETURNING x.attempt, x.spared INTO waited, spares;
        END IF;
        IF FOUND THEN
            INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, message, finished_at)
            VALUES (p_job_id, 'cancelled', waited, spares, 'cancelled before it ran', clock_timestamp());
            RETURN 'cancelled';
        END IF;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE = 'job ' || p_job_id || ' moves on; try again in a new transaction';
END $$;
