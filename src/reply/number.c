/* The values of numbers, where the quick ways of value.h do not lead. */
#include "value.h"

rst_json_number rst_json_unusual_int64(rst_json_number_text n, int64_t *value)
{
    if (!rst_json_begins_number(n.text[0])) {
        return RST_JSON_NOT_NUMBER;
    }
    bool negative = n.text[0] == '-';
    size_t at = negative;
    uint64_t digits = 0;
    for (; at < n.room && n.text[at] >= '0' && n.text[at] <= '9'; at++) {
        if (__builtin_mul_overflow(digits, 10, &digits) ||
            __builtin_add_overflow(digits, (uint64_t)(n.text[at] - '0'), &digits)) {
            digits = UINT64_MAX;
        }
    }
    if (at < n.room && (n.text[at] == '.' || n.text[at] == 'e' || n.text[at] == 'E')) {
        return RST_JSON_NOT_INTEGER;
    }
    if (digits > (uint64_t)INT64_MAX) {
        return RST_JSON_OUT_OF_RANGE;
    }
    *value = negative ? -(int64_t)digits : (int64_t)digits;
    return RST_JSON_NUMBER_FINE;
}

const double rst_json_powers_of_ten[31] = {1e-46, 1e-45, 1e-44, 1e-43, 1e-42, 1e-41, 1e-40, 1e-39,
                                           1e-38, 1e-37, 1e-36, 1e-35, 1e-34, 1e-33, 1e-32, 1e-31,
                                           1e-30, 1e-29, 1e-28, 1e-27, 1e-26, 1e-25, 1e-24, 1e-23,
                                           1e-22, 1e-21, 1e-20, 1e-19, 1e-18, 1e-17, 1e-16};

const uint64_t rst_json_keep_first[25] = {
    [0] = UINT64_MAX,
    [1] = UINT64_MAX,
    [2] = UINT64_MAX,
    [3] = UINT64_MAX,
    [4] = UINT64_MAX,
    [5] = UINT64_MAX,
    [6] = UINT64_MAX,
    [7] = UINT64_MAX,
    [8] = UINT64_MAX,
    [9] = UINT64_C(0x00FFFFFFFFFFFFFF),
    [10] = UINT64_C(0x0000FFFFFFFFFFFF),
    [11] = UINT64_C(0x000000FFFFFFFFFF),
    [12] = UINT64_C(0x00000000FFFFFFFF),
    [13] = UINT64_C(0x0000000000FFFFFF),
    [14] = UINT64_C(0x000000000000FFFF),
    [15] = UINT64_C(0x00000000000000FF),
};

rst_json_number rst_json_double(const rst_json *json, rst_json_node node, double *value)
{
    rst_json_number_text n = rst_json_number_text_of(json, node);
    if (!rst_json_begins_number(n.text[0])) {
        return RST_JSON_NOT_NUMBER;
    }
    *value = rst_json_exact_double(n.text, rst_json_number_end(n.text, 0, n.room));
    return RST_JSON_NUMBER_FINE;
}

rst_json_number rst_json_unusual_float(const rst_json *json, rst_json_node node, float *value)
{
    rst_json_number_text n = rst_json_number_text_of(json, node);
    return rst_json_begins_number(n.text[0]) ? rst_json_exact_float(n, value) : RST_JSON_NOT_NUMBER;
}

rst_json_number rst_json_exact_float(rst_json_number_text n, float *value)
{
    *value = (float)rst_json_exact_double(n.text, rst_json_number_end(n.text, 0, n.room));
    return RST_JSON_NUMBER_FINE;
}
