-- list_attempts: the attempts of one job that did not end in its success, the latest first. Changes nothing.
-- Served by the primary key of attempt, backwards; no row: every attempt so far succeeded, or still runs.
SELECT a.attempt, a.reason, a.error_type, a.error_message, a.traceback, a.worker, a.started_at, a.finished_at
  FROM aioqueue.attempt a
 WHERE a.job_id = %(id)s::uuid
 ORDER BY a.attempt DESC LIMIT %(limit)s::integer
