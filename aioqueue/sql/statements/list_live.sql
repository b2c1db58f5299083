-- list_live: ready jobs (as they will be claimed) or running ones (`running`; the longest first), filtered. Changes nothing.
-- Looks at the first `window` rows of each lane and no others, along live_pkey, and of ready ones then at the first `window`
-- of parked, along its primary key. `lanes` NULL: every lane, found by hopping from one to the next, at most 1,000. Each job is then looked up by its id (LIMIT 1 keeps the planner from joining whole
-- tables). One row at least, as in list_newest.sql; `last` is NULL.
WITH RECURSIVE lanes (lane) AS (
    (SELECT l.lane FROM aioqueue.live l ORDER BY l.lane LIMIT 1)
    UNION ALL
    SELECT (SELECT l.lane FROM aioqueue.live l WHERE l.lane > p.lane ORDER BY l.lane LIMIT 1)
      FROM lanes p WHERE p.lane IS NOT NULL
), w AS MATERIALIZED (
    SELECT h.job_id, h.tenant, h.worker, h.vt, false AS parked
      FROM (SELECT n.lane FROM lanes n WHERE %(lanes)s::text IS NULL LIMIT 1000) n,
           LATERAL (SELECT l.* FROM aioqueue.live l WHERE l.lane = n.lane ORDER BY l.vt, l.job_id LIMIT %(window)s::integer) h
    UNION ALL
    SELECT h.job_id, h.tenant, h.worker, h.vt, false
      FROM unnest(%(lanes)s::text::bigint[]) AS n (lane),
           LATERAL (SELECT l.* FROM aioqueue.live l WHERE l.lane = n.lane ORDER BY l.vt, l.job_id LIMIT %(window)s::integer) h
    UNION ALL
    SELECT p.job_id, p.tenant, NULL, p.pos, true
      FROM (SELECT x.* FROM aioqueue.parked x WHERE NOT %(running)s::boolean ORDER BY x.key, x.pos LIMIT %(window)s::integer) p
     WHERE %(lanes)s::text IS NULL OR p.lane = ANY (%(lanes)s::text::bigint[]))
SELECT s.scanned, NULL::uuid AS last, m.*
  FROM (SELECT count(*) AS scanned FROM w) s
  LEFT JOIN LATERAL (
       SELECT v.*, row_number() OVER (ORDER BY v.started_at, w.parked, v.priority DESC, w.vt, v.id) AS place
         FROM w, LATERAL (
              SELECT j.id, j.state, j.task, j.queue, j.priority, j.tenant, j.attempt, j.spared, j.max_attempts, j.created_at,
                     j.run_at, j.started_at, j.finished_at, j.worker, j.error_type, j.error
                FROM aioqueue.jobs j WHERE j.id = w.job_id LIMIT 1) v
        WHERE (w.worker IS NOT NULL) = %(running)s::boolean
          AND (%(queue)s::text IS NULL OR v.queue = %(queue)s::text)
          AND (%(tenant)s::text IS NULL OR w.tenant = %(tenant)s::text)
          AND (%(task)s::text IS NULL OR v.task = %(task)s::text)
        ORDER BY place LIMIT %(limit)s::integer) m ON true
 ORDER BY m.place
