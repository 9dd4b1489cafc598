// simdjson behind the C interface of json.h.  No exception leaves this file: simdjson's are
// compiled out, and nothing else here throws.
#define SIMDJSON_EXCEPTIONS 0
#include "json.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <simdjson.h>

// simdjson's classes for the first stage alone are the same from its version 1 to version 4.
struct rst_json_index {
    std::unique_ptr<simdjson::internal::dom_parser_implementation> stages;
    size_t capacity;
};

rst_json_index *rst_json_index_new(void)
{
    return new (std::nothrow) rst_json_index{};
}

void rst_json_index_free(rst_json_index *index)
{
    delete index;
}

// Room for a text of `size` bytes; half as much again, so that growing texts do not allocate each
// time.
static bool reserve(rst_json_index *index, size_t size) noexcept
{
    if (index->stages && index->capacity >= size) {
        return true;
    }
    size_t wanted = size + size / 2;
    if (wanted > simdjson::SIMDJSON_MAXSIZE_BYTES) {
        wanted = simdjson::SIMDJSON_MAXSIZE_BYTES;
    }
    index->stages.reset();
    index->capacity = 0;
    // The depth is the second stage's, which is not used.
    const size_t depth = 1;
    if (simdjson::get_active_implementation()->create_dom_parser_implementation(wanted, depth,
                                                                                index->stages)) {
        index->stages.reset();
        return false;
    }
    index->capacity = wanted;
    return true;
}

rst_json_fault rst_json_index_fill(rst_json_index *index, const char *text, size_t size,
                                   uint32_t **places, uint32_t *count)
{
    if (!reserve(index, size)) {
        return RST_JSON_NO_MEMORY;
    }
    simdjson::internal::dom_parser_implementation &stages = *index->stages;
    simdjson::error_code fault = stages.stage1(reinterpret_cast<const uint8_t *>(text), size,
                                               simdjson::stage1_mode::regular);
    if (fault == simdjson::MEMALLOC) {
        return RST_JSON_NO_MEMORY;
    }
    if (fault != simdjson::SUCCESS) {
        return RST_JSON_INVALID;
    }
    *places = stages.structural_indexes.get();
    *count = stages.n_structural_indexes;
    return RST_JSON_FINE;
}

// Power of ten of a number's first digit that is not zero: 1 for 0.xyz, 0 for 0.0xyz.
static int64_t magnitude(const char *at, const char *end) noexcept
{
    int64_t before = 0;
    int64_t zeros = 0;
    bool point = false;
    bool leading = true;
    for (; at < end && *at != 'e' && *at != 'E'; at++) {
        if (*at == '.') {
            point = true;
        } else if (*at != '-') {
            leading = leading && *at == '0';
            before += !point && !leading;
            zeros += point && leading;
        }
    }
    int64_t exponent = 0;
    if (at < end) {
        at += at[1] == '+' ? 2 : 1;
        if (std::from_chars(at, end, exponent).ec == std::errc::result_out_of_range) {
            exponent = *at == '-' ? INT64_MIN / 2 : INT64_MAX / 2;
        }
    }
    return before - zeros + exponent;
}

double rst_json_exact_double(const char *text, size_t size)
{
    double value = 0;
    std::from_chars_result result = std::from_chars(text, text + size, value);
    if (result.ec == std::errc::result_out_of_range) {
        value = magnitude(text, text + size) > 0 ? std::numeric_limits<double>::infinity() : 0.0;
        value = *text == '-' ? -value : value;
    }
    return value;
}

size_t rst_json_write_double(double value, char out[RST_JSON_DOUBLE_SIZE])
{
    // The longest shortest text, "-2.2250738585072014e-308", has 24 bytes.
    char *end = std::to_chars(out, out + RST_JSON_DOUBLE_SIZE - 2, value).ptr;
    size_t size = static_cast<size_t>(end - out);
    if (!std::memchr(out, '.', size) && !std::memchr(out, 'e', size)) {
        std::memcpy(end, ".0", 2);
        size += 2;
    }
    return size;
}
