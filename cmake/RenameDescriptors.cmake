# SPDX-License-Identifier: Apache-2.0
# cmake -DIN=FILE.pb.cc -DOUT=FILE -DAS=ashl_x -P RenameDescriptors.cmake
# Writes generated code whose descriptors call the package ashl_x.v1 and the files ashl_x/v1/…: of the length of "ashlar",
# because descriptors contain lengths. Classes, wire formats and names of calls stay as they are.
file(READ ${IN} code)
string(REGEX REPLACE "\"\n +\"" "" code "${code}")  # the generator splits descriptors at any byte
string(REPLACE "ashlar/v1/" "${AS}/v1/" code "${code}")
string(REPLACE "#include \"${AS}/v1/" "#include \"ashlar/v1/" code "${code}")
string(REPLACE "ashlar.v1" "${AS}.v1" code "${code}")
file(WRITE ${OUT} "${code}")
