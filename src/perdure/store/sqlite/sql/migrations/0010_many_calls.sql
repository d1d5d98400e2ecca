-- Records are counted in an index alone, all of a kind and those of one caller; and the one of a caller's that has rested
-- for longest is found without all of them being sorted.

DROP INDEX session_of_caller;

CREATE INDEX session_of_caller ON session (owner, address, kind, state, active) WHERE state <> 'ended';

DROP INDEX session_state;

CREATE INDEX session_state ON session (kind, state);
