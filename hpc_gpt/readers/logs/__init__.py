"""From a file to what its lines say: fast, in bounded memory, whatever the bytes are."""
