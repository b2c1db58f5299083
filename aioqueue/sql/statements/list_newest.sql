-- list_newest: the newest jobs with their states, newest first, filtered. Changes nothing.
-- Looks at the `window` newest jobs and no others, walking job_pkey backwards; each is then looked up by its id, where
-- OFFSET 0 and LIMIT 1 keep the planner from joining whole tables instead. Filters that match nothing cost one window.
-- One row at least: `scanned` and `last` say what was looked at, and id is NULL where nothing matched.
WITH w AS MATERIALIZED (
    SELECT j.id, j.queue, j.tenant, j.task
      FROM aioqueue.job j
     WHERE %(before)s::uuid IS NULL OR j.id < %(before)s::uuid
     ORDER BY j.id DESC LIMIT %(window)s::integer)
SELECT s.scanned, s.last, m.*
  FROM (SELECT (SELECT count(*) FROM w) AS scanned, (SELECT w.id FROM w ORDER BY w.id LIMIT 1) AS last) s
  LEFT JOIN LATERAL (
       SELECT v.*
         FROM w, LATERAL (
              SELECT j.id, j.state, j.task, j.queue, j.priority, j.tenant, j.attempt, j.spared, j.max_attempts, j.created_at,
                     j.run_at, j.started_at, j.finished_at, j.worker, j.error_type, j.error
                FROM aioqueue.jobs j WHERE j.id = w.id LIMIT 1) v
        WHERE (%(queue)s::text IS NULL OR w.queue = %(queue)s::text)
          AND (%(tenant)s::text IS NULL OR w.tenant = %(tenant)s::text)
          AND (%(task)s::text IS NULL OR w.task = %(task)s::text)
          AND (%(state)s::text IS NULL OR v.state = %(state)s::text)
        ORDER BY v.id DESC LIMIT %(limit)s::integer) m ON true
 ORDER BY m.id DESC
