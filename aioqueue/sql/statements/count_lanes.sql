-- count_lanes: ready and running jobs of every queue and priority, and how long the oldest has been ready. Changes nothing.
-- Looks at the first `cap` rows of each lane, along live_pkey; lanes are found by hopping from one to the next, at most 1,000.
-- `more`: there are, or may be, more rows than were looked at, so that the counts are lower bounds.
-- The age is that of the oldest among the first 1,000 to be claimed, which hold a job of every waiting tenant: since it was
-- enqueued, fell due, or was handed back, whatever came last. No row: nothing is due.
WITH RECURSIVE lanes (lane) AS (
    (SELECT l.lane FROM aioqueue.live l ORDER BY l.lane LIMIT 1)
    UNION ALL
    SELECT (SELECT l.lane FROM aioqueue.live l WHERE l.lane > p.lane ORDER BY l.lane LIMIT 1)
      FROM lanes p WHERE p.lane IS NOT NULL
)
SELECT f.queue, f.priority, sum(c.ready)::integer AS ready, sum(c.running)::integer AS running, bool_or(c.more) AS more,
       max(a.seconds) AS oldest_ready_seconds
  FROM (SELECT n.lane FROM lanes n WHERE n.lane IS NOT NULL LIMIT 1000) n,
       LATERAL (SELECT count(*) FILTER (WHERE h.worker IS NULL) AS ready, count(h.worker) AS running, count(*) = %(cap)s::integer AS more
                  FROM (SELECT l.worker FROM aioqueue.live l WHERE l.lane = n.lane
                         ORDER BY l.vt, l.job_id LIMIT %(cap)s::integer) h) c,
       LATERAL (SELECT j.queue, j.priority FROM aioqueue.live l, LATERAL (
                       SELECT * FROM aioqueue.job b WHERE b.id = l.job_id LIMIT 1) j
                 WHERE l.lane = n.lane ORDER BY l.vt, l.job_id LIMIT 1) f
  LEFT JOIN LATERAL (
       SELECT extract(epoch FROM max(clock_timestamp() - greatest(j.created_at, j.run_at, e.finished_at)))::double precision AS seconds
         FROM (SELECT l.job_id, l.attempt FROM aioqueue.live l WHERE l.lane = n.lane AND l.worker IS NULL
                ORDER BY l.vt, l.job_id LIMIT 1000) h,
              LATERAL (SELECT b.created_at, b.run_at FROM aioqueue.job b WHERE b.id = h.job_id LIMIT 1) j
         LEFT JOIN LATERAL (
              SELECT b.finished_at FROM aioqueue.attempt b WHERE h.attempt > 0 AND b.job_id = h.job_id
               ORDER BY b.attempt DESC LIMIT 1) e ON true) a ON true
 GROUP BY f.queue, f.priority
 ORDER BY f.priority DESC, f.queue
