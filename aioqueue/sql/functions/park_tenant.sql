-- park_tenant: ready → parked, for up to p_limit jobs of one tenant, under its own key, in their order: the first half of giving
-- them positions by a new weight; sweep_parked of that key is the second, also where a process dies in between.
-- Locks the key, then live rows with SKIP LOCKED. Returns the number moved, and the lane and virtual time of the last: call again
-- while it is p_limit, with these, so that it does not walk again over what has gone; NULL begins at the start.
-- Served by live_tenant, lane by lane; lanes are found by hopping from one to the next.
CREATE OR REPLACE FUNCTION aioqueue.park_tenant(
    p_tenant text, p_limit integer, p_lane bigint, p_vt bigint, OUT moved integer, OUT lane bigint, OUT vt bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    rule bigint := aioqueue.limit_key('tenant', p_tenant); hop bigint := p_lane; start bigint := p_vt; got integer; last bigint;
BEGIN
    PERFORM aioqueue.lock_keys(ARRAY[rule]);
    moved := 0;
    IF hop IS NULL THEN
        SELECT l.lane INTO hop FROM aioqueue.live l ORDER BY l.lane LIMIT 1;
    END IF;
    WHILE hop IS NOT NULL AND moved < p_limit LOOP
        WITH d AS (
            DELETE FROM aioqueue.live r WHERE r.ctid = ANY (ARRAY(
                   SELECT l.ctid FROM aioqueue.live l WHERE l.lane = hop AND l.tenant = p_tenant AND l.vt >= coalesce(start, 0) AND l.worker IS NULL
                    ORDER BY l.vt LIMIT p_limit - moved FOR UPDATE SKIP LOCKED))
            RETURNING r.*),
        i AS (
            INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)
            SELECT rule, nextval('aioqueue.pos'::regclass), d.job_id, rule, d.lane, d.tenant, d.attempt, d.spared
              FROM (SELECT * FROM d ORDER BY d.vt, d.job_id) d)
        SELECT count(*), max(d.vt) INTO got, last FROM d;
        IF got > 0 THEN
            moved := moved + got; lane := hop; vt := last;
        END IF;
        start := 0;
        SELECT l.lane INTO hop FROM aioqueue.live l WHERE l.lane > hop ORDER BY l.lane LIMIT 1;
        EXIT WHEN NOT FOUND;
    END LOOP;
END $$;
