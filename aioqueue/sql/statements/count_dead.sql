-- count_dead: jobs that ended as dead in the last 7 days, up to `cap`. Changes nothing. Walks outcome_unsuccessful backwards.
-- Always one row.
SELECT count(*)::integer AS dead
  FROM (SELECT FROM aioqueue.outcome o
         WHERE o.state = 'dead' AND o.state <> 'succeeded' AND o.finished_at > clock_timestamp() - interval '7 days'
         ORDER BY o.finished_at DESC LIMIT %(cap)s::integer) d
