-- Tells the clock, version 1. KEYS: any of the namespace.
return now
