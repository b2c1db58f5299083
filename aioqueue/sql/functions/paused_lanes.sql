-- paused_lanes: the lanes of the queues that are paused, those of their suspects too; '{}' costs one probe.
CREATE OR REPLACE FUNCTION aioqueue.paused_lanes() RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM aioqueue.queue q WHERE q.paused) THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(SELECT aioqueue.lane(q.name, p) FROM aioqueue.queue q, unnest('{-2,-1,0,1,2,9}'::integer[]) AS p WHERE q.paused);
END $$;
