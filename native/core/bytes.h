/* Bytes that grow at their end.  {0} is an empty one; the owner calls ls_bytes_free. */
#ifndef LS_BYTES_H
#define LS_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint8_t *data;                     /* moves when the buffer grows: keep no pointer into it */
    size_t size;
    size_t capacity;
} ls_bytes;

void ls_bytes_free(ls_bytes *bytes);

/* Allocates so that `more` bytes fit after the first `size` bytes; `size` stays.  Returns false, and
 * changes nothing, if there is no memory. */
bool ls_bytes_reserve(ls_bytes *bytes, size_t more);

/* Appends a copy of `data`, which must not be inside the buffer.  Returns false as above. */
bool ls_bytes_put(ls_bytes *bytes, const void *data, size_t size);

#endif
