-- sweep_parked: parked → ready, for up to p_limit jobs of any keys that have room: what an end of a job that was not followed
-- by its unpark has left (a process that died in between, a cancelled job), and what a limit that was raised or lifted lets go.
-- One at a time (a try-lock of the transaction): -1 when another is at it. p_keys: only these, without that lock; then what a
-- changed limit lets go is seen to at once. Keys are found by hopping from one to the next, 1,000 at most.
-- Returns the number made ready: call again while it is not 0.
CREATE OR REPLACE FUNCTION aioqueue.sweep_parked(p_limit integer, p_keys bigint[] DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    found bigint[] := p_keys; hop bigint; moved integer := 0;
BEGIN
    IF p_keys IS NULL THEN
        IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.sweep_parked', 0)) THEN
            RETURN -1;
        END IF;
        found := '{}';
        SELECT p.key INTO hop FROM aioqueue.parked p ORDER BY p.key, p.pos LIMIT 1;
        WHILE FOUND AND cardinality(found) < 1000 LOOP
            found := found || hop;
            SELECT p.key INTO hop FROM aioqueue.parked p WHERE p.key > hop ORDER BY p.key, p.pos LIMIT 1;
        END LOOP;
    END IF;
    PERFORM aioqueue.lock_keys(found);
    FOREACH hop IN ARRAY found LOOP
        EXIT WHEN moved >= p_limit;
        moved := moved + (SELECT u.moved FROM aioqueue.unpark_key(hop, NULL, 0, 0, p_limit - moved) AS u);
    END LOOP;
    RETURN moved;
END $$;
