-- record: running → succeeded, dead, cancelled, scheduled or ready, for a batch of any outcomes of one worker's jobs.
-- p_outcomes: [{"j": job id, "l": lane, "v": vt, "a": attempt, "o": the reason, "d": seconds until it runs again (null: dead),
-- "s": spared, "t"/"m"/"b": error type, message, traceback, "u": the unknown task's name}, …]. Successes come in the arrays,
-- which run in parallel, p_results a jsonb array of them; or among the others, as "o": "succeeded", "r": result.
-- The fence is (lane, vt, job_id, worker, attempt): a job that is no longer this worker's returns no row and changes
-- nothing, so the same call may be repeated. XID first. Rows are locked with SKIP LOCKED: one that somebody holds (a cancel
-- in a transaction left open) keeps no other waiting; it returns 'locked', unchanged, and is to be sent again.
-- Where there were successes only and all of them were recorded, one row without a job_id says so.
-- The limited keys that the jobs held are free with the commit; the worker unparks after it.
-- A table of no length holds no key, whatever a snapshot sees: then none is looked for.
-- Served by live_pkey, one probe each.
CREATE OR REPLACE FUNCTION aioqueue.record(
    p_worker bigint, p_outcomes jsonb, p_ids uuid[] DEFAULT '{}', p_lanes bigint[] DEFAULT '{}', p_vts bigint[] DEFAULT '{}',
    p_attempts integer[] DEFAULT '{}', p_results jsonb DEFAULT '[]'
) RETURNS TABLE (job_id uuid, state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    x record; r aioqueue.live; done uuid[]; limited boolean; others boolean := p_outcomes <> '[]';
BEGIN
    PERFORM pg_current_xact_id();
    limited := pg_relation_size('aioqueue.held'::regclass) > 0;
    IF others THEN
        SELECT p_ids || coalesce(array_agg(e.j), '{}'), p_lanes || coalesce(array_agg(e.l), '{}'), p_vts || coalesce(array_agg(e.v), '{}'),
               p_attempts || coalesce(array_agg(e.a), '{}'), p_results || coalesce(jsonb_agg(e.r), '[]')
          INTO p_ids, p_lanes, p_vts, p_attempts, p_results
          FROM jsonb_to_recordset(p_outcomes) AS e (j uuid, l bigint, v bigint, a integer, o text, r jsonb) WHERE e.o = 'succeeded';
    END IF;
    IF cardinality(p_ids) > 0 THEN
        WITH o AS (
            SELECT e.j, e.l, e.v, e.a, e.r
              FROM ROWS FROM (unnest(p_ids), unnest(p_lanes), unnest(p_vts), unnest(p_attempts), jsonb_array_elements(p_results)) AS e (j, l, v, a, r)
             ORDER BY e.l, e.v, e.j),
        k AS MATERIALIZED (
            SELECT o.j, o.a, o.r, f.c, f.spared, f.claimed_at FROM o,
                   LATERAL (SELECT l.ctid AS c, l.spared, l.claimed_at FROM aioqueue.live l
                             WHERE l.lane = o.l AND l.vt = o.v AND l.job_id = o.j AND l.worker = p_worker AND l.attempt = o.a
                             LIMIT 1 FOR UPDATE SKIP LOCKED) f),
        d AS (DELETE FROM aioqueue.live l WHERE l.ctid = ANY (ARRAY(SELECT k.c FROM k))),
        h AS (DELETE FROM aioqueue.held h WHERE h.ctid = ANY (ARRAY(
              SELECT y.c FROM k, LATERAL (SELECT x.ctid AS c FROM aioqueue.held x WHERE limited AND x.job_id = k.j LIMIT 8) y))),
        w AS (INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, started_at, finished_at)
              SELECT k.j, 'succeeded', k.a, k.spared, k.r, k.claimed_at, clock_timestamp() FROM k)
        SELECT array_agg(k.j) INTO done FROM k;
        IF NOT others AND cardinality(done) = cardinality(p_ids) THEN
            RETURN QUERY SELECT NULL::uuid, 'succeeded'::text;
            RETURN;
        END IF;
        RETURN QUERY SELECT u, 'succeeded'::text FROM unnest(done) AS u;
    END IF;
    FOR x IN
        SELECT e.* FROM jsonb_to_recordset(p_outcomes) AS e (j uuid, l bigint, v bigint, a integer, o text, d double precision, s boolean, t text, m text, b text, u text)
         WHERE e.o <> 'succeeded' ORDER BY e.l, e.v, e.j
    LOOP
        SELECT l.* INTO r FROM aioqueue.live l
         WHERE l.lane = x.l AND l.vt = x.v AND l.job_id = x.j AND l.worker = p_worker AND l.attempt = x.a FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        job_id := x.j;
        state := aioqueue.return_job(r, r.lane, x.o, x.t, x.m, x.b, x.d, coalesce(x.s, false), x.u);
        RETURN NEXT;
    END LOOP;
    -- What was done has left its place; what is still there is held by somebody.
    RETURN QUERY
    SELECT e.j, 'locked'::text
      FROM (SELECT * FROM unnest(p_ids, p_lanes, p_vts, p_attempts) AS u (j, l, v, a)
            UNION ALL SELECT y.j, y.l, y.v, y.a FROM jsonb_to_recordset(p_outcomes) AS y (j uuid, l bigint, v bigint, a integer, o text) WHERE y.o <> 'succeeded') e,
           LATERAL (SELECT FROM aioqueue.live l
                     WHERE l.lane = e.l AND l.vt = e.v AND l.job_id = e.j AND l.worker = p_worker AND l.attempt = e.a LIMIT 1) f;
END $$;
