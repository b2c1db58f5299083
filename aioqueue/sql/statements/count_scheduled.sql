-- count_scheduled: how many jobs are not due yet, how many of them wait to run again, and when the next one is due.
-- Changes nothing. Looks at the first `cap` rows along scheduled_pkey; a count of `cap` means: that many or more.
-- Always one row.
SELECT count(*)::integer AS scheduled, count(*) FILTER (WHERE s.attempt > 0)::integer AS retrying, min(s.run_at) AS next_due,
       extract(epoch FROM min(s.run_at) - clock_timestamp())::double precision AS next_due_seconds
  FROM (SELECT x.run_at, x.attempt FROM aioqueue.scheduled x ORDER BY x.run_at, x.job_id LIMIT %(cap)s::integer) s
