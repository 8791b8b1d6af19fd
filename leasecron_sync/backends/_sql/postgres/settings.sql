-- What a session of this user begins with, and where that was set; for who only looks.
SELECT s.name, s.reset_val, s.source
FROM pg_catalog.pg_settings s
WHERE s.name = ANY (%(names)s)
