/* The call of a codec, which is a Python function, and what its errors mean. */
#ifndef LS_CODEC_CALL_H
#define LS_CODEC_CALL_H

#include "module.h"

/* Calls a codec on the bytes at `data`, which must not change during the call.  `limit` bounds what
 * decompression may return; -1 for compression.  Return a new reference to bytes, or NULL with what
 * the codec raised. */
PyObject *ls_codec_call(PyObject *callable, unsigned codec, const uint8_t *data, size_t size,
                        int64_t limit);

/* After a codec raised on a batch with a right checksum: a ValueError becomes CorruptLogError, with
 * the ValueError as its cause.  Any other exception stays.  `reason` NULL: the codec's own words. */
void ls_codec_raise_corrupt(ls_module *module, const char *reason, PyObject *path, int64_t position,
                            int64_t start, int64_t end);

#endif
