-- list_paused: what is paused: queues, then tenants. Changes nothing. No row: nothing is.
SELECT p.kind, p.name
  FROM (SELECT 'queue' AS kind, q.name FROM aioqueue.queue q WHERE q.paused
        UNION ALL
        SELECT 'tenant', l.name FROM aioqueue.limits l WHERE l.kind = 'tenant' AND l.paused) p
 ORDER BY p.kind, p.name LIMIT %(limit)s::integer
