-- virtual_time: how far a lane has come. A sequence, not a row: read and written outside MVCC, so a REPEATABLE READ
-- caller sees today's value and a held xmin horizon leaves no dead versions. Lanes with equal low 10 bits share a cell.
-- One expression, which the planner puts in place of the call.
CREATE OR REPLACE FUNCTION aioqueue.virtual_time(p_lane bigint) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(pg_catalog.pg_sequence_last_value(('aioqueue.v' || (p_lane & 1023))::regclass), 0)
$$;
