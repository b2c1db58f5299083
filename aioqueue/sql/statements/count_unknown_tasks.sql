-- count_unknown_tasks: jobs that wait because no worker that claimed them knew their task, by the task's name.
-- Changes nothing. Looks at the first `cap` rows of scheduled_unknown_task. No row: all is known.
SELECT s.unknown_task AS task, count(*)::integer AS jobs
  FROM (SELECT x.unknown_task FROM aioqueue.scheduled x WHERE x.unknown_task IS NOT NULL
         ORDER BY x.unknown_task, x.job_id LIMIT %(cap)s::integer) s
 GROUP BY s.unknown_task
 ORDER BY jobs DESC, s.unknown_task
