-- publish: moves a lane's virtual time forward, never back.
-- Compare and set under an advisory lock of the cell; who does not get the lock leaves it to its holder or the next tick.
-- setval takes an XID, so this stands in transactions of its own (tick), with the commit not waiting for the disk: a value
-- lost in a crash of the server is noticed by its new start time, and floors go to zero.
CREATE OR REPLACE FUNCTION aioqueue.publish(p_lane bigint, p_vt bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF aioqueue.virtual_time(p_lane) < p_vt
       AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('aioqueue.publish', p_lane & 1023)) THEN
        IF aioqueue.virtual_time(p_lane) < p_vt THEN
            PERFORM pg_catalog.setval(('aioqueue.v' || (p_lane & 1023))::regclass, p_vt);
        END IF;
    END IF;
END $$;
