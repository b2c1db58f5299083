-- list_ended: dead or cancelled jobs (`state`), those that ended last first, filtered. Changes nothing.
-- Looks at the `window` last ones and no others, walking outcome_unsuccessful backwards; each is then looked up by its id
-- (LIMIT 1 keeps the planner from joining whole tables). One row at least, as in list_newest.sql; `last` is NULL.
WITH w AS MATERIALIZED (
    SELECT o.job_id, o.finished_at
      FROM aioqueue.outcome o
     WHERE o.state = %(state)s::text AND o.state <> 'succeeded'
     ORDER BY o.finished_at DESC LIMIT %(window)s::integer)
SELECT s.scanned, NULL::uuid AS last, m.*
  FROM (SELECT count(*) AS scanned FROM w) s
  LEFT JOIN LATERAL (
       SELECT v.*
         FROM w, LATERAL (
              SELECT j.id, j.state, j.task, j.queue, j.priority, j.tenant, j.attempt, j.spared, j.max_attempts, j.created_at,
                     j.run_at, j.started_at, j.finished_at, j.worker, j.error_type, j.error
                FROM aioqueue.jobs j WHERE j.id = w.job_id LIMIT 1) v
        WHERE (%(queue)s::text IS NULL OR v.queue = %(queue)s::text)
          AND (%(tenant)s::text IS NULL OR coalesce(v.tenant, '') = %(tenant)s::text)
          AND (%(task)s::text IS NULL OR v.task = %(task)s::text)
        ORDER BY w.finished_at DESC, v.id LIMIT %(limit)s::integer) m ON true
 ORDER BY m.finished_at DESC, m.id
