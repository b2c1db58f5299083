-- list_handed_back: unfinished jobs whose last 21 claims or more were all handed back without being held against them (clean
-- stop, unknown task, no free connection; a snooze ends the row). Changes nothing. Looks at the first `cap` rows of scheduled,
-- where such jobs wait at most a minute, along scheduled_pkey, and of each lane along live_pkey. No row: none.
WITH RECURSIVE lanes (lane) AS (
    (SELECT l.lane FROM aioqueue.live l ORDER BY l.lane LIMIT 1)
    UNION ALL
    SELECT (SELECT l.lane FROM aioqueue.live l WHERE l.lane > p.lane ORDER BY l.lane LIMIT 1)
      FROM lanes p WHERE p.lane IS NOT NULL
), c AS MATERIALIZED (
    SELECT s.job_id, s.spared
      FROM (SELECT x.job_id, x.spared FROM aioqueue.scheduled x ORDER BY x.run_at, x.job_id LIMIT %(cap)s::integer) s
     WHERE s.spared > 20
    UNION ALL
    SELECT h.job_id, h.spared
      FROM (SELECT n.lane FROM lanes n WHERE n.lane IS NOT NULL LIMIT 1000) n,
           LATERAL (SELECT l.job_id, l.spared FROM aioqueue.live l WHERE l.lane = n.lane
                     ORDER BY l.vt, l.job_id LIMIT %(cap)s::integer) h
     WHERE h.spared > 20)
SELECT c.job_id AS id, j.task, j.queue, nullif(j.tenant, '') AS tenant, c.spared, a.reason
  FROM c,
       LATERAL (SELECT * FROM aioqueue.job b WHERE b.id = c.job_id LIMIT 1) j,
       LATERAL (SELECT count(*) AS last, (array_agg(x.reason ORDER BY x.attempt DESC))[1] AS reason,
                       bool_and(x.reason IN ('interrupted', 'unknown task', 'no connection')) AS handed_back
                  FROM (SELECT b.attempt, b.reason FROM aioqueue.attempt b WHERE b.job_id = c.job_id
                         ORDER BY b.attempt DESC LIMIT 21) x) a
 WHERE a.last = 21 AND a.handed_back
 ORDER BY c.spared DESC, c.job_id LIMIT %(limit)s::integer
