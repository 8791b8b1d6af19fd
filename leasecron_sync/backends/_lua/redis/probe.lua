-- Makes the store where there is none, version 1. Returns its clock and its id.
return {now, meet_store()}
