-- report: how far running jobs are, for a batch of jobs in one process; changes nothing about the jobs themselves.
-- p_reports: [{"w": worker, "j": job id, "l": lane, "v": vt, "a": attempt, "n": number of the row, "p": value, "m": message,
-- "d": [numbers of the rows before, which go]}, …]; "p" null: the run has ended, its rows go.
-- The fence is (lane, vt, job_id, worker, attempt): a job that is no longer that worker's gets no row. It is read, not locked: a
-- row that comes beside the job's end is seen by nobody, and the sweep takes it. A number that is there stays as it is.
-- Served by live_pkey and progress_pkey, one probe for each row.
CREATE OR REPLACE FUNCTION aioqueue.report(p_reports jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    DELETE FROM aioqueue.progress p WHERE p.ctid = ANY (ARRAY(
        SELECT y.c FROM jsonb_to_recordset(p_reports) AS e (w bigint, j uuid, a integer, d integer[]), unnest(e.d) AS o (n),
               LATERAL (SELECT x.ctid AS c FROM aioqueue.progress x
                         WHERE x.job_id = e.j AND x.attempt = e.a AND x.number = o.n AND x.worker = e.w LIMIT 1) y));
    INSERT INTO aioqueue.progress (job_id, attempt, number, worker, value, message, reported_at)
    SELECT e.j, e.a, e.n, e.w, e.p, e.m, clock_timestamp()
      FROM jsonb_to_recordset(p_reports) AS e (w bigint, j uuid, l bigint, v bigint, a integer, n integer, p double precision, m text),
           LATERAL (SELECT FROM aioqueue.live l
                     WHERE l.lane = e.l AND l.vt = e.v AND l.job_id = e.j AND l.worker = e.w AND l.attempt = e.a LIMIT 1) f
     WHERE e.p IS NOT NULL
    ON CONFLICT DO NOTHING;
END $$;
