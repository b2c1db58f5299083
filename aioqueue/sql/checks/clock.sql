-- clock: the server's clock, in seconds since 1970. Changes nothing.
SELECT extract(epoch FROM pg_catalog.clock_timestamp())::double precision AS seconds
