/* The swaps of torch.randperm on a CPU (randperm_cpu in ATen/native/TensorFactories.cpp), and those of numpy's
 * RandomState.shuffle (frozen by NEP 19), for cachefs.planning.sequences.sampler.
 *
 * Each swap depends on the ones before, so numpy cannot do them at once: 1.28 M of torch's take 3 ms here and 0.7 s
 * in Python. Other threads run meanwhile, which they do not while numpy shuffles: 14 M samples stopped the daemon for
 * 1.1 s.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

/* draws: count - 1 outputs of the generator. order: count numbers, shuffled in place. */
static void swap_all(uint32_t *order, const uint32_t *draws, size_t count) {
    for (size_t i = 0; i + 1 < count; i++) {
        size_t j = i + draws[i] % (uint32_t)(count - i);
        uint32_t chosen = order[j];
        order[j] = order[i];
        order[i] = chosen;
    }
}

/* Settles order[last], order[last - 1], ..., each by the first draw that, cut to as many bits as the place has, is not
 * beyond it. Returns the place that is settled next; 0 when all are. */
static size_t swap_masked(uint32_t *order, const uint32_t *draws, size_t drawn, size_t last) {
    for (size_t i = 0; i < drawn && last > 0; i++) {
        uint32_t mask = (uint32_t)last;
        for (int shift = 1; shift < 32; shift *= 2)
            mask |= mask >> shift;
        uint32_t j = draws[i] & mask;
        if (j > last)
            continue;
        uint32_t chosen = order[j];
        order[j] = order[last];
        order[last--] = chosen;
    }
    return last;
}

/* A contiguous buffer of uint32, in this machine's byte order. Returns 0, or -1 with an exception set. */
static int get_numbers(PyObject *object, Py_buffer *view, int flags, const char *name) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0)
        return -1;
    const char *format = view->format;
    int is_unsigned = format && (format[0] == 'I' || format[0] == 'L') && format[1] == '\0';
    if (view->itemsize != sizeof(uint32_t) || view->ndim != 1 || !is_unsigned) {
        PyErr_Format(PyExc_TypeError, "%s must be an array of uint32 of one dimension", name);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static PyObject *shuffle(PyObject *module, PyObject *arguments) {
    PyObject *order_object, *draws_object;
    Py_buffer order, draws;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO:shuffle", &order_object, &draws_object))
        return NULL;
    if (get_numbers(order_object, &order, PyBUF_WRITABLE, "order") < 0)
        return NULL;
    if (get_numbers(draws_object, &draws, 0, "draws") < 0) {
        PyBuffer_Release(&order);
        return NULL;
    }
    size_t count = (size_t)order.len / sizeof(uint32_t), drawn = (size_t)draws.len / sizeof(uint32_t);
    int fits = count <= UINT32_MAX && drawn + 1 >= count;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        swap_all(order.buf, draws.buf, count);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "%zd draws do not shuffle %zd numbers", (Py_ssize_t)drawn, (Py_ssize_t)count);
    }
    PyBuffer_Release(&draws);
    PyBuffer_Release(&order);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *shuffle_masked(PyObject *module, PyObject *arguments) {
    PyObject *order_object, *draws_object;
    Py_ssize_t last;
    Py_buffer order, draws;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOn:shuffle_masked", &order_object, &draws_object, &last))
        return NULL;
    if (get_numbers(order_object, &order, PyBUF_WRITABLE, "order") < 0)
        return NULL;
    if (get_numbers(draws_object, &draws, 0, "draws") < 0) {
        PyBuffer_Release(&order);
        return NULL;
    }
    size_t count = (size_t)order.len / sizeof(uint32_t), drawn = (size_t)draws.len / sizeof(uint32_t);
    int fits = last >= 0 && (size_t)last < count && count <= UINT32_MAX;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        last = (Py_ssize_t)swap_masked(order.buf, draws.buf, drawn, (size_t)last);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "%zd is not a place among %zd numbers", last, (Py_ssize_t)count);
    }
    PyBuffer_Release(&draws);
    PyBuffer_Release(&order);
    return fits ? PyLong_FromSsize_t(last) : NULL;
}

static PyMethodDef methods[] = {
    {"shuffle", shuffle, METH_VARARGS,
     "Shuffle order in place as torch does; draws: the generator's outputs, one fewer than order has numbers.\n\n"
     "Both are arrays of uint32 of one dimension. Raises TypeError, ValueError, BufferError."},
    {"shuffle_masked", shuffle_masked, METH_VARARGS,
     "Go on with a shuffle as numpy's RandomState does it, at place last, down to 0; draws: the generator's next outputs."
     "\n\nReturns the place with which the next outputs go on; 0: the order is shuffled. Both are arrays of uint32 of "
     "one dimension. Raises TypeError, ValueError, BufferError."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_shuffle",
    .m_doc = "The swaps of torch.randperm, and of numpy's RandomState.shuffle.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__shuffle(void) {
    return PyModuleDef_Init(&definition);
}
