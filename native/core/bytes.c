#include "bytes.h"

#include <stdlib.h>
#include <string.h>

void ls_bytes_free(ls_bytes *bytes)
{
    free(bytes->data);
    memset(bytes, 0, sizeof *bytes);
}

bool ls_bytes_reserve(ls_bytes *bytes, size_t more)
{
    size_t need;
    if (__builtin_add_overflow(bytes->size, more, &need)) {
        return false;
    }
    if (need <= bytes->capacity) {
        return true;
    }
    size_t capacity = bytes->capacity < 4096 ? 4096 : bytes->capacity;
    while (capacity < need) {
        if (__builtin_mul_overflow(capacity, (size_t)2, &capacity)) {
            return false;
        }
    }
    uint8_t *data = realloc(bytes->data, capacity);
    if (data == NULL) {
        return false;
    }
    bytes->data = data;
    bytes->capacity = capacity;
    return true;
}

bool ls_bytes_put(ls_bytes *bytes, const void *data, size_t size)
{
    if (!ls_bytes_reserve(bytes, size)) {
        return false;
    }
    memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
    return true;
}
