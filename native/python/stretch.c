#include "stretch.h"

#include <string.h>

#include "codec_call.h"

bool ls_stretch_open(ls_stretch *stretch, FileObject *file, int64_t position, int64_t limit,
                     int64_t expected, int64_t offset_max, int64_t budget, size_t io_bytes)
{
    if (position < 0 || limit < position || budget <= 0 || offset_max == INT64_MAX) {
        PyErr_Format(PyExc_ValueError, "cannot read from %lld to %lld", (long long)position,
                     (long long)limit);
        return false;
    }
    if (!ls_file_pin(file)) {
        return false;
    }
    memset(stretch, 0, sizeof *stretch);
    stretch->file = file;
    stretch->position = position;
    stretch->limit = limit;
    stretch->stop = budget < limit - position ? position + budget : limit;
    stretch->expected = expected;
    stretch->offset_max = offset_max;
    ls_window_init(&stretch->window, file->io, file->fd, io_bytes);
    return true;
}

void ls_stretch_close(ls_stretch *stretch)
{
    ls_window_free(&stretch->window);
    ls_file_unpin(stretch->file);
}

ls_status ls_stretch_next(ls_stretch *stretch)
{
    if (stretch->position >= stretch->stop) {
        return ls_fail(LS_END, stretch->position, "");
    }
    ls_status status = ls_window_batch(&stretch->window, stretch->position, stretch->limit,
                                       &stretch->batch, &stretch->data);
    if (status.code == LS_OK && (stretch->batch.base_offset < stretch->expected ||
                                 stretch->batch.last_offset > stretch->offset_max)) {
        status = ls_fail(LS_E_CORRUPT, stretch->position, "offsets do not follow one another");
    }
    if (status.code == LS_OK && ls_batch_codec(&stretch->batch) > LS_CODEC_MAX) {
        status = ls_fail(LS_E_CODEC, stretch->position, "unknown compression");
    }
    return status;
}

void ls_stretch_pass(ls_stretch *stretch)
{
    stretch->position += stretch->batch.size;
    stretch->expected = stretch->batch.last_offset + 1;
}

bool ls_stretch_raise(ls_stretch *stretch, ls_module *module, ls_status status)
{
    ls_raise(module, status, stretch->file->path, stretch->expected, stretch->offset_max + 1);
    return false;
}

ls_status ls_stretch_status(const ls_stretch *stretch, ls_code code, const char *reason)
{
    if (code == LS_E_TOO_LARGE) {
        reason = "a segment or batch would be larger than 2 GiB";
    }
    return ls_fail(code, stretch->position, code == LS_E_NO_MEMORY ? "no memory" : reason);
}

PyObject *ls_stretch_unpack(ls_stretch *stretch, ls_module *module, PyObject *decompress,
                            int64_t most)
{
    PyObject *bytes = ls_codec_call(decompress, ls_batch_codec(&stretch->batch),
                                    stretch->data + LS_BATCH_HEADER_BYTES,
                                    (size_t)stretch->batch.size - LS_BATCH_HEADER_BYTES, most);
    if (bytes == NULL) {
        ls_codec_raise_corrupt(module, "its records cannot be unpacked", stretch->file->path,
                               stretch->position, stretch->expected, stretch->offset_max + 1);
    }
    return bytes;
}
