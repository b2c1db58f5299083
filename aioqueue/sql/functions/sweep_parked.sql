-- sweep_parked: parked → ready, for up to p_limit jobs of any keys that have room: what an end of a job that was not followed
-- by its unpark has left (a process that died in between, a cancelled job), and what a limit that was raised or lifted lets go.
-- One at a time (a try-lock of the transaction): -1 when another is at it. p_keys: only these, without that lock, so that what a
-- changed limit lets go is seen to at once. p_lifted: only where there is no limit any more. Returns the number made ready: call
-- again, p_lifted, while it is p_limit. Held rows of jobs that do not run any more, which settle_limits may have left, are
-- deleted first: claim and end write held and live in one transaction, so no snapshot shows another's row without its job. Keys are found by hopping from one to the next, from any of them on, 1,000 at most.
CREATE OR REPLACE FUNCTION aioqueue.sweep_parked(p_limit integer, p_keys bigint[] DEFAULT NULL, p_lifted boolean DEFAULT false)
RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    found_keys bigint[] := p_keys; hop bigint; began bigint; moved integer := 0;
BEGIN
    IF p_keys IS NULL THEN
        IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.sweep_parked', 0)) THEN
            RETURN -1;
        END IF;
        found_keys := '{}';
        began := ((random() * 2 - 1) * 9e18)::bigint;
        FOR turn IN 1..2 LOOP
            hop := CASE WHEN turn = 1 THEN began ELSE -9223372036854775808 END;
            LOOP
                SELECT p.key INTO hop FROM aioqueue.parked p WHERE p.key > hop ORDER BY p.key, p.pos LIMIT 1;
                EXIT WHEN NOT FOUND OR cardinality(found_keys) >= 1000 OR turn = 2 AND hop > began;
                found_keys := found_keys || hop;
            END LOOP;
        END LOOP;
    END IF;
    PERFORM aioqueue.lock_keys(found_keys);
    FOREACH hop IN ARRAY found_keys LOOP
        EXIT WHEN moved >= p_limit;
        CONTINUE WHEN p_lifted AND EXISTS (
            SELECT FROM (SELECT p.rule FROM aioqueue.parked p WHERE p.key = hop ORDER BY p.pos LIMIT 1) p,
                   LATERAL (SELECT FROM aioqueue.limits l WHERE l.key = p.rule LIMIT 1) l);
        IF NOT p_lifted THEN
            DELETE FROM aioqueue.held r WHERE r.ctid = ANY (ARRAY(
                   SELECT h.ctid FROM aioqueue.held h
                    WHERE h.key = hop AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.job_id = h.job_id AND l.worker = h.worker)
                      FOR UPDATE SKIP LOCKED));
        END IF;
        moved := moved + (SELECT u.moved FROM aioqueue.unpark_key(hop, NULL, 0, 0, p_limit - moved) AS u);
    END LOOP;
    RETURN moved;
END $$;
