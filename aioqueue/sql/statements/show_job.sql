-- show_job: one job with all that is known of it; no row: unknown, or not of `tenant` (NULL: any). Changes nothing. Served by the primary keys and the
-- indexes on job_id, through the view jobs.
SELECT j.id, j.state, j.task, j.queue, j.priority, j.tenant, j.key, j.parked, j.attempt, j.spared, j.max_attempts, j.created_at, j.run_at,
       j.started_at, j.finished_at, j.worker, p.progress, j.unknown_task, j.retry_of, j.error_type, j.error, j.payload, j.result
  FROM aioqueue.jobs j
  LEFT JOIN LATERAL (SELECT jsonb_build_object('value', b.value, 'message', b.message, 'at', b.reported_at) AS progress FROM aioqueue.progress b
                      WHERE b.job_id = j.id AND b.attempt = j.attempt AND b.worker = j.worker AND j.state = 'running'
                      ORDER BY b.number DESC LIMIT 1) p ON true
 WHERE j.id = %(id)s::uuid AND (%(tenant)s::text IS NULL OR coalesce(j.tenant, '') = %(tenant)s::text)
