-- list_workers: every worker that has a row (at most 1,000), the living first, and how many running jobs name it.
-- Changes nothing. `dead`: said so, or its lease has ended by the database's clock; its row goes once nothing names it.
-- A worker that running jobs name but that has no row is listed with NULLs. The jobs are counted among the first `cap` rows
-- of each lane, along live_pkey, of at most 1,000 lanes found by hopping from one to the next.
WITH RECURSIVE lanes (lane) AS (
    (SELECT l.lane FROM aioqueue.live l ORDER BY l.lane LIMIT 1)
    UNION ALL
    SELECT (SELECT l.lane FROM aioqueue.live l WHERE l.lane > p.lane ORDER BY l.lane LIMIT 1)
      FROM lanes p WHERE p.lane IS NOT NULL
), held AS (
    SELECT h.worker, count(*)::integer AS jobs
      FROM (SELECT n.lane FROM lanes n WHERE n.lane IS NOT NULL LIMIT 1000) n,
           LATERAL (SELECT l.worker FROM aioqueue.live l WHERE l.lane = n.lane
                     ORDER BY l.vt, l.job_id LIMIT %(cap)s::integer) h
     WHERE h.worker IS NOT NULL GROUP BY h.worker)
SELECT coalesce(w.id, h.worker) AS id, w.host, w.pid, w.version, w.queues, w.running, w.problems, w.concurrency, w.started_at, w.beat_at,
       extract(epoch FROM clock_timestamp() - w.beat_at)::double precision AS beat_seconds,
       w.id IS NULL OR w.dead OR w.lease_until < clock_timestamp() AS dead, coalesce(h.jobs, 0) AS holds
  FROM (SELECT * FROM aioqueue.worker x ORDER BY x.dead, x.beat_at DESC LIMIT 1000) w
  FULL JOIN held h ON h.worker = w.id
 ORDER BY dead, w.host, w.pid, id LIMIT 1000
