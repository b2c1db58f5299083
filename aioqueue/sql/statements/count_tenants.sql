-- count_tenants: the tenants with most ready jobs, over all queues, parked ones among them; tenant NULL: jobs of none.
-- Changes nothing. Looks at the first `cap` rows of parked, along its primary key, and at the first `cap` rows of each lane,
-- along live_pkey, of at most 1,000 lanes found by hopping from one to the next;
-- a tenant's jobs behind that are not counted.
WITH RECURSIVE lanes (lane) AS (
    (SELECT l.lane FROM aioqueue.live l ORDER BY l.lane LIMIT 1)
    UNION ALL
    SELECT (SELECT l.lane FROM aioqueue.live l WHERE l.lane > p.lane ORDER BY l.lane LIMIT 1)
      FROM lanes p WHERE p.lane IS NOT NULL
)
SELECT nullif(h.tenant, '') AS tenant, count(*)::integer AS ready
  FROM (SELECT x.tenant
          FROM (SELECT n.lane FROM lanes n WHERE n.lane IS NOT NULL LIMIT 1000) n,
               LATERAL (SELECT l.tenant, l.worker FROM aioqueue.live l WHERE l.lane = n.lane
                         ORDER BY l.vt, l.job_id LIMIT %(cap)s::integer) x
         WHERE x.worker IS NULL
        UNION ALL
        (SELECT p.tenant FROM aioqueue.parked p ORDER BY p.key, p.pos LIMIT %(cap)s::integer)) h
 GROUP BY h.tenant
 ORDER BY ready DESC, h.tenant LIMIT %(limit)s::integer
