-- sweep_parked: parked → ready, for up to p_limit jobs of any keys that have room: what an end of a job that was not followed
-- by its unpark has left (a process that died in between, a cancelled job), and what a limit that was raised or lifted lets go.
-- Of up to 50 keys above p_after and up to p_upto, found by hopping from one to the next; last: the highest of them, to go on from, NULL
-- when there was none. One at a time (a try-lock of the transaction): moved is -1 when another is at it. p_keys: only these, without
-- that lock, so that what a changed limit lets go is seen to at once.
-- Jobs of queues that are paused, or that no living worker serves, go whatever the room is: ready they are in nobody's way, while parked
-- they would stand before the others of their key for ever.
-- p_again: only those, and those of lifted limits; call it while moved is p_limit.
-- Held rows of jobs that do not run any more, which settle_limits may have left, are deleted first: claim and end write held and live
-- in one transaction, so no snapshot shows another's row without its job.
-- p_held, p_parked: as unpark's.
CREATE OR REPLACE FUNCTION aioqueue.sweep_parked(
    p_limit integer, p_keys bigint[], p_again boolean, p_after bigint, p_upto bigint, p_held jsonb, p_parked jsonb,
    OUT moved integer, OUT last bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    found_keys bigint[] := p_keys; hop bigint := p_after; served bigint[]; idle bigint[]; held_from bigint; parked_from bigint; wanted integer;
BEGIN
    moved := 0;
    IF p_keys IS NULL THEN
        IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.sweep_parked', 0)) THEN
            moved := -1;
            RETURN;
        END IF;
        found_keys := '{}';
        LOOP
            SELECT p.key INTO hop FROM aioqueue.parked p WHERE p.key > hop AND p.key <= p_upto ORDER BY p.key, p.pos LIMIT 1;
            EXIT WHEN NOT FOUND;
            found_keys := found_keys || hop;
            EXIT WHEN cardinality(found_keys) = 50;
        END LOOP;
        last := found_keys[cardinality(found_keys)];
        served := aioqueue.served_lanes();
    END IF;
    idle := aioqueue.paused_lanes();
    PERFORM aioqueue.lock_keys(found_keys);
    FOREACH hop IN ARRAY found_keys LOOP
        EXIT WHEN moved >= p_limit;
        held_from := coalesce((p_held ->> hop::text)::bigint, 0);
        parked_from := coalesce((p_parked ->> hop::text)::bigint, 0);
        IF p_again THEN
            wanted := CASE WHEN EXISTS (
                SELECT FROM (SELECT p.rule FROM aioqueue.parked p WHERE p.key = hop AND p.pos >= parked_from ORDER BY p.pos LIMIT 1) p,
                       LATERAL (SELECT FROM aioqueue.limits l WHERE l.key = p.rule LIMIT 1) l) THEN 0 END;
        ELSE
            DELETE FROM aioqueue.held r WHERE r.ctid = ANY (ARRAY(
                   SELECT h.ctid FROM aioqueue.held h
                    WHERE h.key = hop AND h.pos >= held_from
                      AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.job_id = h.job_id AND l.worker = h.worker)
                      FOR UPDATE SKIP LOCKED));
        END IF;
        moved := moved + (SELECT u.moved FROM aioqueue.unpark_key(hop, wanted, held_from, parked_from, p_limit - moved, idle, served) AS u);
    END LOOP;
END $$;
