-- tick: what a worker must know about 20 times a second while busy, once a poll when idle; changes nothing but V and
-- requests to cancel that have no job left.
-- Order matters. V of each lane is read FIRST (and the clock, which is that of scheduled). Then the tick takes an XID of its
-- own: whoever takes a later one reads V after us. Then comes the snapshot, in a later statement, and last the floor's
-- question (is a ready row visible from (from_vt, from_id) up to to_vt? p_to_vts[i] NULL: not asked). Any other order would
-- lose the job of a transaction that starts in between. V is published at the end, since that would take the XID too early.
-- snapshot is pg_current_snapshot() with our XID as its xmax: its own is one above the last XID that ENDED, and the newest
-- transactions run from there on without being named; here they are. scheduled is asked in microseconds since 1970.
-- paused: the lanes of paused queues, whose ready rows are no work.
-- Rows of live claimed by a transaction still in flight are visible as ready, so a claim that rolls back is never below a floor.
CREATE OR REPLACE FUNCTION aioqueue.tick(
    p_worker bigint, p_lanes bigint[], p_claimed_vts bigint[], p_from_vts bigint[], p_from_ids uuid[], p_to_vts bigint[],
    p_due_from timestamptz, p_due_to timestamptz,
    OUT vts bigint[], OUT clock timestamptz, OUT snapshot text, OUT first_vts bigint[], OUT first_ids uuid[],
    OUT first_due timestamptz, OUT next_due timestamptz, OUT losses boolean, OUT cancelled uuid[], OUT timeline text,
    OUT server_start timestamptz, OUT paused bigint[]
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    i integer; found_vt bigint; found_id uuid; own bigint; seen pg_snapshot;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    vts := '{}'; first_vts := '{}'; first_ids := '{}';
    FOR i IN 1..cardinality(p_lanes) LOOP
        vts := vts || aioqueue.virtual_time(p_lanes[i]);
    END LOOP;
    clock := clock_timestamp();
    own := pg_current_xact_id()::text::bigint;
    seen := pg_current_snapshot();
    snapshot := pg_snapshot_xmin(seen)::text || ':' || own || ':' || array_to_string(ARRAY(
        SELECT x::text FROM pg_snapshot_xip(seen) AS x
        UNION ALL SELECT x::text FROM generate_series(pg_snapshot_xmax(seen)::text::bigint, own - 1) AS x), ',');
    FOR i IN 1..cardinality(p_lanes) LOOP
        found_vt := NULL; found_id := NULL;
        IF p_to_vts[i] IS NOT NULL THEN
            SELECT l.vt, l.job_id INTO found_vt, found_id FROM aioqueue.live l
             WHERE l.lane = p_lanes[i] AND (l.vt, l.job_id) >= (p_from_vts[i], p_from_ids[i]) AND l.vt <= p_to_vts[i] AND l.worker IS NULL
             ORDER BY l.vt, l.job_id LIMIT 1;
        END IF;
        first_vts := first_vts || found_vt; first_ids := first_ids || found_id;
    END LOOP;
    IF p_due_to IS NOT NULL THEN
        SELECT s.run_at INTO first_due FROM aioqueue.scheduled s
         WHERE s.run_at >= p_due_from AND s.run_at <= p_due_to ORDER BY s.run_at, s.job_id LIMIT 1;
    END IF;
    SELECT s.run_at INTO next_due FROM aioqueue.scheduled s WHERE s.run_at >= p_due_from ORDER BY s.run_at, s.job_id LIMIT 1;
    paused := aioqueue.paused_lanes();
    losses := EXISTS (SELECT FROM aioqueue.worker w WHERE w.id <> p_worker AND (w.dead OR w.lease_until < clock));
    cancelled := ARRAY(SELECT c.job_id FROM aioqueue.cancel c WHERE c.worker = p_worker);
    IF cardinality(cancelled) > 0 THEN
        DELETE FROM aioqueue.cancel c WHERE c.worker = p_worker
           AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.job_id = c.job_id AND l.worker = p_worker);
    END IF;
    FOR i IN 1..cardinality(p_lanes) LOOP
        IF p_claimed_vts[i] > vts[i] THEN
            PERFORM aioqueue.publish(p_lanes[i], p_claimed_vts[i]);
        END IF;
    END LOOP;
    timeline := left(pg_walfile_name(pg_current_wal_lsn()), 8);
    server_start := pg_postmaster_start_time();
END $$;
