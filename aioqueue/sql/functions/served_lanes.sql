-- served_lanes: the lanes of the queues that a living worker serves, those of their suspects too; NULL while there is no worker.
-- Reads the table of workers, so it is for what happens now and then.
CREATE OR REPLACE FUNCTION aioqueue.served_lanes() RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT array_agg(aioqueue.lane(q.name, p))
              FROM (SELECT DISTINCT u.name FROM aioqueue.worker w, unnest(w.queues) AS u (name)
                     WHERE NOT w.dead AND w.lease_until > pg_catalog.clock_timestamp()) q,
                   unnest('{-2,-1,0,1,2,9}'::integer[]) AS p);
END $$;
